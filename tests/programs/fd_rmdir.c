// What is open in a directory that is deleted keeps working: a file, a FIFO with data, a listening socket, the
// directory itself, and a process that works in it. `gone`: it is deleted before the first checkpoint. `churn`:
// directories come and go all the time, as an MPI launcher's session directories do, so that one which a process had
// open at the checkpoint may be gone by the time of the crash.
#include "check.h"
#include <sys/socket.h>
#include <sys/un.h>

struct place { int dir, file, fifo_r, fifo_w, sock; char name[64], inner[80]; };

// Nobody holds a directory open between its mkdir and the open of something in it: then it may be gone after a restart.
static void make_dirs(struct place *p) {
    do {
        if (mkdir(p->name, 0750) == -1) CHECK(errno == EEXIST);
        if (mkdir(p->inner, 0700) == -1) CHECK(errno == EEXIST || errno == ENOENT);
        p->dir = open(p->inner, O_RDONLY | O_DIRECTORY);
    } while (p->dir == -1 && errno == ENOENT);
    OK(p->dir);
}

static void enter(struct place *p, uint64_t n) {
    char path[128];
    snprintf(p->name, sizeof p->name, "session.%d.%llu", getpid(), (unsigned long long)n);
    snprintf(p->inner, sizeof p->inner, "%s/inner", p->name);
    make_dirs(p);
    snprintf(path, sizeof path, "%s/data", p->inner);
    p->file = (int)OK(open(path, O_RDWR | O_CREAT | O_TRUNC, 0640));
    static uint64_t blk[512];
    fill(blk, 4096, n);
    full_write(p->file, blk, 4096);
    snprintf(path, sizeof path, "%s/fifo", p->inner);
    int r;
    // A FIFO that nobody has open yet may be gone as well.
    do {
        r = mkfifo(path, 0600);
        CHECK(r == 0 || errno == EEXIST);
        p->fifo_r = open(path, O_RDONLY | O_NONBLOCK);
    } while (p->fifo_r == -1 && errno == ENOENT);
    OK(p->fifo_r);
    p->fifo_w = (int)OK(open(path, O_WRONLY));
    full_write(p->fifo_w, blk, 1000);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%.70s/sock", p->inner);
    p->sock = (int)OK(socket(AF_UNIX, SOCK_STREAM, 0));
    unlink(a.sun_path);
    OK(bind(p->sock, (struct sockaddr *)&a, sizeof a));
    OK(listen(p->sock, 4));
}

static void remove_all(struct place *p) {
    static const char *names[] = {"data", "fifo", "sock"};
    char path[128];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", p->inner, names[i]);
        if (unlink(path) == -1) CHECK(errno == ENOENT);
    }
    if (rmdir(p->inner) == -1) CHECK(errno == ENOENT);
    if (rmdir(p->name) == -1) CHECK(errno == ENOENT);
}

static void look(struct place *p, uint64_t n) {
    static uint64_t blk[512];
    struct stat st;
    EQ(pread(p->file, blk, 4096, 0), 4096);
    verify(blk, 4096, n, "the file's block");
    memset(blk, 0, sizeof blk);
    EQ(read(p->fifo_r, blk, 4096), 1000);
    EQ(write(p->fifo_w, blk, 1000), 1000);
    OK(fstat(p->dir, &st));
    CHECK(S_ISDIR(st.st_mode));
    struct sockaddr_un a;
    socklen_t l = sizeof a;
    OK(getsockname(p->sock, (struct sockaddr *)&a, &l));
    CHECK(strstr(a.sun_path, p->inner) == a.sun_path);
}

static void drop(struct place *p) {
    close(p->dir), close(p->file), close(p->fifo_r), close(p->fifo_w), close(p->sock);
}

int main(int argc, char **argv) {
    begin("fd_rmdir");
    struct place p;
    int churn = argc > 1 && !strcmp(argv[1], "churn");
    int go[2];
    pid_t child = 0;
    if (!churn) {
        enter(&p, 1);
        OK(pipe(go));
        child = (pid_t)OK(fork());
        if (!child) {
            begin_child();
            OK(fchdir(p.dir));
            close(go[1]);
            char c;
            OK(write(p.fifo_w, "", 1));
            EQ(read(go[0], &c, 1), 0);
            struct stat st, there;
            OK(stat(".", &st));
            OK(fstat(p.dir, &there));
            EQ(st.st_nlink, 0);
            EQ(st.st_ino, there.st_ino);
            _exit(7);
        }
        char buf[1001];
        int got = 0;
        while (got < 1001) {
            ssize_t n = read(p.fifo_r, buf, (size_t)(1001 - got));
            if (n > 0) got += (int)n;
        }
        full_write(p.fifo_w, buf, 1000);
        remove_all(&p);
    }
    while (running()) {
        if (churn) {
            uint64_t n = check_round;
            enter(&p, n);
            look(&p, n);
            nap_us(2000);
            remove_all(&p);
            look(&p, n);
            nap_us(500);
            look(&p, n);
            drop(&p);
        } else {
            struct stat st;
            nap_us(1000);
            look(&p, 1);
            OK(fstat(p.file, &st));
            EQ(st.st_nlink, 0);
            OK(fstat(p.dir, &st));
            EQ(st.st_nlink, 0);
            CHECK(access(p.name, F_OK) == -1);
        }
    }
    if (!churn) {
        int s;
        close(go[0]), close(go[1]);
        EQ(OK(waitpid(child, &s, 0)), child);
        CHECK(WIFEXITED(s) && WEXITSTATUS(s) == 7);
    }
    return finish();
}
