// A program that closes every descriptor, clears its environment and leaves its directory. Its verdict goes to a file.
#include "check.h"
#include <dirent.h>
int main(void) {
    begin("odd_bare");
    char out[PATH_MAX];
    CHECK(getcwd(out, sizeof out - 16));
    strcat(out, "/verdict");
    clearenv();
    extern char **environ;
    static char *empty[1];
    environ = empty;
    OK(chdir("/"));
    OK(setsid() == -1 && errno == EPERM ? 0 : 0);
    closefrom(0);
    while (running()) {
        nap_us(2000);
        for (int i = 0; i < 20; i++) if (fcntl(i, F_GETFD) != -1 || errno != EBADF) fail("descriptor %d is open", i);
        CHECK(environ[0] == NULL);
    }
    int fd = (int)OK(open(out, O_WRONLY | O_CREAT | O_TRUNC, 0644));
    EQ(fd, 0);
    dup2(0, 1);
    return finish();
}
