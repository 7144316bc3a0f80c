// Runs `mpirun ... mpi_once` again and again: mpi_loop COMMAND... Each must end with rank 0's exit status, 17.
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
        // The heartbeat goes on while the job starts.
        for (;;) {
            pid_t r = waitpid(p, &st, WNOHANG);
            if (r == p) break;
            EQ(r, 0);
            nap_us(5000);
            int64_t t = now_ns();
            if (t - check_last > 4000000) {
                check_last = t;
                check_round++;
                beat();
            }
        }
        EQ(st, 17 << 8);
        no_children();
    }
    return finish();
}
