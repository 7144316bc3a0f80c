// Two processes on two hosts that know nothing of each other's end: what runs them must end both.
//
// net_alone OTHER-HOST         starts, through ssh: net_alone below GO BEAT
//
// SIGTERM does not end the first either: it notes it in BEAT.term, and does not wait for the other any more.
#include "../check.h"

static volatile sig_atomic_t terminated;
static void on_term(int s) {
    (void)s;
    terminated = 1;
}
int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "below")) {
        setenv("BELAY_TEST_GO", argv[2], 1);
        setenv("BELAY_TEST_BEAT", argv[3], 1);
        begin("net_alone below");
        check_quiet_parent = 1;
        while (running()) usleep(2000);
        return finish();
    }
    CHECK(argc == 2);
    begin("net_alone");
    // An agent that is killed leaves it to another parent.
    check_quiet_parent = 1;
    struct sigaction a = {.sa_handler = on_term};
    OK(sigaction(SIGTERM, &a, NULL));
    char line[3 * PATH_MAX + 32], path[PATH_MAX], mark[PATH_MAX + 8];
    ssize_t n = OK(readlink("/proc/self/exe", path, sizeof path - 1));
    path[n] = 0;
    snprintf(line, sizeof line, "%s below %s %s.below", path, check_go, check_beat);
    snprintf(mark, sizeof mark, "%s.term", check_beat);
    pid_t shell = (pid_t)OK(fork());
    if (!shell) {
        execlp("ssh", "ssh", argv[1], line, NULL);
        fail("ssh: %s", strerror(errno));
    }
    while (running()) {
        usleep(2000);
        if (terminated) OK(close((int)OK(open(mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0666))));
    }
    if (!terminated) {
        reap(shell, 0);
        no_children();
    }
    return finish();
}
