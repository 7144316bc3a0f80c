// A library that takes part in checkpoints: no thread is inside when the program is stopped, and all go on whatever
// becomes of the agent or of the library.
// gate_work [host HOST here|there] [talks] [alone] [kids] [ACTION [close|open|rebuild asked|ready|answered [TIMES]]]: something goes
// wrong so many times, as long as there is no file `spare` beside GO; in a child, where
// there are some. One that talks tells the others how much it has done, and all find the same sums before they are at
// rest. With `alone` the main thread exits, and the others go on. With HOST the same program runs there too (below GO BEAT), started through ssh, and goes wrong on
// one of the two.
#include "gate.h"
#include <sys/random.h>

static char action[16];
static uint32_t at_kind;
static int at_edge;
static _Atomic int times = 1;
static int acts, has_kids;
static pid_t kids[2], agent;
static char spare[PATH_MAX + 8];
static char told[300] = "the test library has something better to do";

static int is(const char *a) { return strcmp(action, a) == 0; }
static void say(const char *what) {
    char b[64];
    int n = snprintf(b, sizeof b, "%s in %d\n", what, getpid());
    full_write(1, b, (size_t)n);
}

static void hook(uint32_t kind, int edge) {
    if (edge == EDGE_READY) gate_outcome = GATE_DONE;
    if (kind != at_kind || edge != at_edge || times <= 0 || !acts || access(spare, F_OK) == 0) return;
    times--;
    say(action);
    if (is("mute")) for (;;) pause();
    if (is("late")) nap_us(1500000);
    if (is("ends")) syscall(SYS_exit, 0);
    if (is("dies")) kill(getpid(), SIGKILL);
    if (is("stops")) raise(SIGSTOP);
    if (is("agent")) OK(kill(agent, SIGKILL));
    if (is("refuses") || is("busy") || is("huge") || is("wild")) {
        gate_outcome = is("busy") ? GATE_BUSY : GATE_REFUSED;
        gate_page->fault.address = is("wild") ? 16 : (uintptr_t)told;
        gate_page->fault.bytes = is("huge") ? 1ULL << 60 : strlen(told);
    }
    if (is("wide")) gate_told[2] = (char)300, gate_told[3] = 300 >> 8;
    if (is("endless")) gate_page->told.bytes = 1ULL << 60;
    if (is("narrow")) gate_page->room.bytes = 5;
    if (is("early")) {
        gate_page->answer = gate_page->order + (9 << 8);
        nap_us(300000);
    }
    if (is("forges")) gate_page->hold[0].value = gate_page->hold[1].value = 1;
}

static _Atomic unsigned long talked;
static uint64_t others, talker;
static uint32_t talk(uint32_t round) {
    static uint64_t one = 1;
    uint64_t done = gate_before, heard, sum;
    char key[60];
    snprintf(key, sizeof key, "done of %d in %lx", getpid(), (unsigned long)talker);
    gate_page->told.bytes = 0;
    switch (round) {
    case 0:
        gate_tell(GATE_FACT, key, &done, sizeof done);
        gate_tell(GATE_WISH, "done *", NULL, 0);
        gate_tell(GATE_SUM, "those who talk", &one, sizeof one);
        gate_tell(GATE_SUM, "done", &done, sizeof done);
        return GATE_MORE;
    case 1:
        EQ(gate_heard(GATE_SUM, "those who talk", &others), 1);
        EQ(gate_heard(GATE_SUM, "done", &sum), 1);
        EQ(gate_heard(GATE_FACT, "done of", &heard), others);
        EQ(heard, sum);
        EQ(gate_heard(GATE_FACT, key, &heard), 1);
        EQ(heard, done);
        gate_tell(GATE_SUM, "agreed", &one, sizeof one);
        gate_tell(GATE_WISH, "what nobody knows", NULL, 0);
        return GATE_MORE;
    default:
        EQ(round, 2);
        EQ(gate_heard(GATE_SUM, "agreed", &sum), 1);
        EQ(sum, others);
        EQ(gate_heard(GATE_FACT, "", &heard), 0);
        talked++;
        return GATE_DONE;
    }
}

static _Atomic int over;
static void *work(void *arg) {
    unsigned long n = (unsigned long)(uintptr_t)arg;
    while (!over) {
        gate_enter();
        gate_before++;
        if (n % 3 == 0) nap_us(700);
        // From before it is asked to come to rest until it is told to go on.
        while (gate_careless && !over) nap_us(700);
        gate_after++;
        gate_leave();
        if (++n % 5 == 0) nap_us(100);
    }
    return NULL;
}

static void lie(void) {
    if (is("magic")) gate_page->magic = 7;
    if (is("version")) gate_page->version = 77;
    if (is("owner")) gate_page->owner = 1;
    if (is("closes")) OK(close(gate_page->descriptor));
    if (is("swaps")) {
        int other = (int)OK(open("/dev/null", O_RDONLY));
        OK(dup3(other, gate_page->descriptor, O_CLOEXEC));
        OK(close(other));
    }
    gate_careless = is("careless");
}

// Starts the program on another host, where it goes wrong if it is to do so there.
static pid_t start_on(const char *host, const char *first, char **words) {
    char line[4 * PATH_MAX], path[PATH_MAX];
    ssize_t n = OK(readlink("/proc/self/exe", path, sizeof path - 1));
    path[n] = 0;
    int at = snprintf(line, sizeof line, "exec %s below %s %s.below", path, check_go, check_beat);
    at += snprintf(line + at, sizeof line - (size_t)at, " %s", first);
    for (; words && *words; words++) at += snprintf(line + at, sizeof line - (size_t)at, " %s", *words);
    pid_t shell = (pid_t)OK(fork());
    if (shell) return shell;
    execlp("ssh", "ssh", host, line, NULL);
    fail("ssh: %s", strerror(errno));
}

static pid_t shell;
static int talks, is_child;
static int live(void) {
    pthread_t t[3];
    for (unsigned long i = 0; i < 3; i++) CHECK(pthread_create(&t[i], NULL, work, (void *)(uintptr_t)(i * 7)) == 0);
    unsigned long last = 0, quiet = 0;
    while (running()) {
        nap_us(2000);
        // A gate that nobody opens keeps everybody out.
        quiet = gate_after == last ? quiet + 1 : 0;
        last = gate_after;
        if (quiet > 5000) fail("nobody has come in for ten seconds; shut by %x", gate_shut);
    }
    over = 1;
    for (int i = 0; i < 3; i++) CHECK(pthread_join(t[i], NULL) == 0);
    EQ(gate_before, gate_after);
    for (int k = 0; has_kids && !is_child && k < 2; k++) {
        int st;
        OK(waitpid(kids[k], &st, 0));
        CHECK(st == 0 || (k == 0 && is("dies") && st == SIGKILL));
    }
    if (shell) reap(shell, 0);
    if (talks && !talked && !*action) fail("nobody has talked");
    printf("closed %lu opened %lu rebuilt %lu orphaned %lu\n", gate_closed, gate_opened, gate_rebuilt, gate_orphaned);
    return is_child ? 0 : finish();
}
static void *live_on(void *arg) {
    (void)arg;
    exit(live());
}

int main(int argc, char **argv) {
    int a = 1, alone = 0;
    if (argc > 3 && strcmp(argv[1], "below") == 0) {
        setenv("BELAY_TEST_GO", argv[2], 1);
        setenv("BELAY_TEST_BEAT", argv[3], 1);
        a = 4;
    }
    begin("gate_work");
    // An agent that is killed leaves it to another parent.
    check_quiet_parent |= a > 1 || (argc > 1 && strcmp(argv[1], "host") == 0);
    agent = getppid();
    snprintf(spare, sizeof spare, "%s", check_go);
    snprintf(strrchr(spare, '/') ? strrchr(spare, '/') : spare, 8, "/spare");
    OK(getrandom(&talker, sizeof talker, 0));
    if (a + 2 < argc && strcmp(argv[a], "host") == 0) {
        int there = strcmp(argv[a + 2], "there") == 0;
        talks = a + 3 < argc && strcmp(argv[a + 3], "talks") == 0;
        char **rest = argv + a + 3 + talks;
        shell = start_on(argv[a + 1], talks ? "talks" : "", there ? rest : NULL);
        a = there ? argc : a + 3 + talks;
    } else if (a < argc && strcmp(argv[a], "talks") == 0) {
        talks = 1;
        a++;
    }
    if (talks) gate_talk = talk;
    if (a < argc && strcmp(argv[a], "alone") == 0) alone = a++;
    if (a < argc && strcmp(argv[a], "kids") == 0) has_kids = a++;
    if (a < argc) snprintf(action, sizeof action, "%s", argv[a++]);
    if (a + 1 < argc) {
        const char *kinds[] = {"close", "open", "rebuild"}, *edges[] = {"asked", "ready", "answered"};
        for (int i = 0; i < 3; i++) {
            if (strcmp(argv[a], kinds[i]) == 0) at_kind = (uint32_t)i + 1;
            if (strcmp(argv[a + 1], edges[i]) == 0) at_edge = i;
        }
        CHECK(at_kind);
        if (a + 2 < argc) times = atoi(argv[a + 2]);
    }
    gate_hook = hook;
    gate_join("libgate_test.so");
    acts = !has_kids;
    for (int k = 0; has_kids && !is_child && k < 2; k++) {
        kids[k] = (pid_t)OK(fork());
        if (kids[k]) continue;
        begin_child();
        is_child = 1;
        acts = k == 0;
    }
    if (acts) lie();
    if (alone) {
        pthread_t other;
        CHECK(pthread_create(&other, NULL, live_on, NULL) == 0);
        pthread_exit(NULL);
    }
    return live();
}
