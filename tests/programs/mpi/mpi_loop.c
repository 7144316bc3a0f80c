// Runs `mpirun ... mpi_once` again and again: mpi_loop RANKS MAY_HANG COMMAND... Each run must end well, and all its
// ranks must have said that their messages were right. With MAY_HANG 1, one that does not come back from MPI_Finalize
// is ended: that of MPICH 4.0 may hang where UCX uses TCP (openucx/ucx#8738; one run in three with UCX_TLS=tcp,self),
// as it does between ranks restarted in the midst of MPI_Init (docs/limits.md).
#include "../check.h"
enum { PATIENCE_S = 15 };
// Takes in what the ranks have said by now: returns how many have said `+` (mpirun may put what several say in one
// line); other lines are the harness's to see.
static int verified(int from) {
    static char line[4096];
    static size_t held;
    int n = 0;
    for (ssize_t r; (r = read(from, line + held, sizeof line - 1 - held)) > 0;) {
        held += (size_t)r;
        line[held] = 0;
        char *at = line;
        for (char *end; (end = strchr(at, '\n')); at = end + 1) {
            *end = 0;
            size_t length = strlen(at);
            if (strspn(at, "+") == length)
                n += (int)length;
            else
                printf("%s\n", at);
        }
        held -= (size_t)(at - line);
        memmove(line, at, held);
        if (held == sizeof line - 1) fail("a line without end: %s", line);
    }
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
            int64_t waited = (now_ns() - since) / 1000000000LL;
            if (!given_up && waited > PATIENCE_S) {
                printf("a run that has not come back from MPI_Finalize for %d s is ended\n", PATIENCE_S);
                given_up = 1;
                OK(kill(p, SIGTERM));
            }
            if (waited > 2 * PATIENCE_S) OK(kill(p, SIGKILL));
        }
        EQ(count + verified(said[0]), ranks);
        if (!given_up) EQ(st, 0);
        OK(close(said[0]));
        no_children();
    }
    return finish();
}
