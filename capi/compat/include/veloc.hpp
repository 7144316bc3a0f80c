/* For programs that write "include/veloc.hpp". */
#include "../veloc.hpp"
