/* For programs that write "include/veloc.h". */
#include "../veloc.h"
