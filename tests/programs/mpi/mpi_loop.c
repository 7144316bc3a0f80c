// Runs `mpirun ... mpi_once` again and again: mpi_loop COMMAND... Each must end well.
#include "../check.h"
int main(int argc, char **argv) {
    begin("mpi_loop");
    CHECK(argc > 1);
    while (running()) {
        pid_t p = fork();
        if (p == 0) {
            execvp(argv[1], argv + 1);
            _exit(127);
        }
        int st;
        for (pid_t r; (r = waitpid(p, &st, WNOHANG)) != p;) {
            EQ(r, 0);
            nap_us(5000);
            running();  // the heartbeat goes on while the job starts
        }
        EQ(st, 0);
        no_children();
    }
    return finish();
}
