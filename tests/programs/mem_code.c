// Programs, libraries and data files that are mapped: they stay what they were, whatever becomes of the files. mem_code
// DATA [names]: DATA is mapped privately and has the pattern of seed 7; with `names`, executable mappings keep their
// names.
#include "check.h"
#define MOST 256
static struct range { uintptr_t from, to; uint64_t sum; char name[PATH_MAX]; } ranges[MOST];
static int count;

static uint64_t sum_of(const void *p, size_t bytes) {
    const uint64_t *w = p;
    uint64_t s = bytes;
    for (size_t i = 0; i < bytes / 8; i++) s = mix(s ^ w[i]);
    return s;
}
static void undelete(char *name) {
    char *end = strstr(name, " (deleted)");
    if (end) *end = 0;
}
// Mappings of files that can only be read and executed.
static int code(struct range *out) {
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f);
    char line[PATH_MAX + 200];
    int n = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to;
        char name[PATH_MAX] = "";
        if (sscanf(line, "%lx-%lx r-xp %*s %*s %*s %[^\n]", &from, &to, name) < 2 || name[0] != '/') continue;
        CHECK(n < MOST);
        undelete(name);
        out[n].from = from;
        out[n].to = to;
        memcpy(out[n++].name, name, sizeof name);
    }
    fclose(f);
    return n;
}
static uint64_t sum_of_file(int fd) {
    struct stat st;
    OK(fstat(fd, &st));
    CHECK(!(st.st_mode & 07000));
    char *all = malloc((size_t)st.st_size);
    CHECK(all && pread(fd, all, (size_t)st.st_size, 0) == st.st_size);
    uint64_t s = sum_of(all, (size_t)st.st_size);
    free(all);
    return s;
}
static uint64_t own_program(char *link) {
    ssize_t n = readlink("/proc/self/exe", link, PATH_MAX - 1);
    OK(n);
    link[n] = 0;
    undelete(link);
    int fd = (int)OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    uint64_t s = sum_of_file(fd);
    OK(close(fd));
    return s;
}
int main(int argc, char **argv) {
    begin("mem_code");
    check_quiet_parent = 1;
    CHECK(argc > 1);
    int names = argc > 2, fd = (int)OK(open(argv[1], O_RDONLY));
    struct stat st;
    OK(fstat(fd, &st));
    size_t bytes = (size_t)st.st_size;
    char *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(data != MAP_FAILED);
    OK(close(fd));
    char link[PATH_MAX], now[PATH_MAX];
    uint64_t program = own_program(link);
    // One that reads itself (an archive behind the program, a self-extracting one) has it open.
    int held = (int)OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    count = code(ranges);
    CHECK(count > 2);
    for (int i = 0; i < count; i++) ranges[i].sum = sum_of((void *)ranges[i].from, ranges[i].to - ranges[i].from);
    pid_t c = fork();
    if (c == 0) begin_child();
    static struct range found[MOST];
    for (uint64_t r = 0; running(); r++) {
        verify(data, bytes, 7, "mapped file");
        struct range *x = &ranges[r % (uint64_t)count];
        CHECK(sum_of((void *)x->from, x->to - x->from) == x->sum);
        if (own_program(now) != program) fail("/proc/self/exe has other contents");
        if (strcmp(now, link)) fail("/proc/self/exe is %s, was %s", now, link);
        if (sum_of_file(held) != program) fail("the open program has other contents");
        if (names) {
            // A restart between two pieces of what is read shows some twice.
            for (int i = 0; code(found) != count; i++) CHECK(i < 3);
            for (int i = 0; i < count; i++)
                if (strcmp(found[i].name, ranges[i].name)) fail("a mapping of %s is one of %s", ranges[i].name, found[i].name);
        }
        nap_us(1000);
    }
    if (c == 0) _exit(0);
    int status;
    OK(waitpid(c, &status, 0));
    EQ(status, 0);
    return finish();
}
