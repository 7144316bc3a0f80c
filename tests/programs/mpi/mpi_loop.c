// Runs `mpirun ... mpi_once` again and again: mpi_loop RANKS MAY_HANG COMMAND... Each run must end well, and all its ranks must have said that their messages were right.
// With MAY_HANG 1, one that does not come back from MPI_Finalize is ended: that of MPICH 4.0 may hang where UCX uses TCP (openucx/ucx#8738; one run in three with UCX_TLS=tcp,self), as it does between ranks restarted
// in the midst of MPI_Init (docs/limits.md).
#include "../check.h"
enum { PATIENCE_S = 15 };
// Counts what the ranks have said by now.
static int verified(int from) {
    char b[256];
    int n = 0;
    for (ssize_t r; (r = read(from, b, sizeof b)) > 0;)
        for (ssize_t i = 0; i < r; i++) n += b[i] == '+';
    return n;
}
int main(int argc, char **argv) {
    begin("mpi_loop");
    CHECK(argc > 3);
    const int ranks = atoi(argv[1]), may_hang = atoi(argv[2]);
    while (running()) {
        int said[2];
        OK(pipe2(said, O_CLOEXEC));
        pid_t p = fork();
        if (p == 0) {
            dup2(said[1], 1);
            execvp(argv[3], argv + 3);
            _exit(127);
        }
        OK(close(said[1]));
        OK(fcntl(said[0], F_SETFL, O_NONBLOCK));
        int st, count = 0, given_up = 0;
        int64_t since = now_ns();
        for (pid_t r; (r = waitpid(p, &st, WNOHANG)) != p;) {
            EQ(r, 0);
            nap_us(5000);
            running();  // the heartbeat goes on while the job starts
            count += verified(said[0]);
            if (!may_hang || count < ranks) since = now_ns();
            if (!given_up && now_ns() - since > PATIENCE_S * 1000000000LL) {
                given_up = 1;
                OK(kill(p, SIGTERM));
            }
        }
        EQ(count + verified(said[0]), ranks);
        if (!given_up) EQ(st, 0);
        OK(close(said[0]));
        no_children();
    }
    return finish();
}
