// Memory shared between processes stays shared. mem_shared KIND: anon, file, memfd, shm (POSIX), shmgone (unlinked),
// sysv, sysvgone.
#include "check.h"
#include <sys/ipc.h>
#include <sys/shm.h>
#define LEN (64 * 4096)
#define NP 3
struct head { _Atomic uint64_t turn, by[NP]; _Atomic int ending; };
int main(int argc, char **argv) {
    const char *kind = argc > 1 ? argv[1] : "anon";
    char name[64], path[128];
    snprintf(name, sizeof name, "mem_shared-%s", kind);
    begin(name);
    int fd = -1, id = -1;
    void *p, *again = NULL;
    snprintf(path, sizeof path, "/belay-%s-%d-%d", kind, getuid(), getpid());
    if (!strcmp(kind, "anon")) p = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    else if (!strncmp(kind, "sysv", 4)) {
        id = (int)OK(shmget(!strcmp(kind, "sysv") ? 0x62650000 + (getpid() & 0xffff) : IPC_PRIVATE, LEN, IPC_CREAT | 0640));
        p = shmat(id, NULL, 0);
        again = shmat(id, NULL, SHM_RDONLY);
        CHECK(again != (void *)-1);
        if (!strcmp(kind, "sysvgone")) OK(shmctl(id, IPC_RMID, NULL));
    } else {
        if (!strcmp(kind, "file")) {
            snprintf(path, sizeof path, "shared.%d", getpid());
            fd = (int)OK(open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
        } else if (!strcmp(kind, "memfd")) {
            fd = (int)OK(memfd_create("a name", MFD_ALLOW_SEALING));
        } else {
            shm_unlink(path);  // a job that was killed may have had this number
            fd = (int)OK(shm_open(path, O_RDWR | O_CREAT | O_EXCL, 0600));
        }
        OK(ftruncate(fd, LEN));
        p = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        again = mmap(NULL, LEN - 8192, PROT_READ, MAP_SHARED, fd, 8192);  // a second view at another offset
        CHECK(again != MAP_FAILED);
        if (!strcmp(kind, "shmgone")) OK(shm_unlink(path));
        if (!strcmp(kind, "memfd")) OK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    }
    CHECK(p != MAP_FAILED && p != (void *)-1);
    struct head *h = p;
    char *data = (char *)p + 8192;
    fill(data, LEN - 8192, 0);
    pid_t kid[NP];
    for (int k = 1; k < NP; k++) {
        kid[k] = fork();
        if (kid[k] == 0) {
            begin_child();
            while (!h->ending) {
                uint64_t t = h->turn;
                if ((int)(t % NP) != k) { nap_us(200); continue; }
                verify(data, LEN - 8192, t, "shared memory");
                fill(data, LEN - 8192, t + 1);
                h->by[k]++;
                h->turn = t + 1;
            }
            _exit(0);
        }
    }
    uint64_t mine = 0;
    while (running()) {
        int64_t t0 = now_ns();
        while (h->turn % NP) {
            if (now_ns() - t0 > 10000000000LL) fail("turn %llu: another process does not see the memory any more", (unsigned long long)h->turn);
            nap_us(200);
        }
        uint64_t t = h->turn;
        verify(data, LEN - 8192, t, "shared memory");
        if (again) verify(!strncmp(kind, "sysv", 4) ? (char *)again + 8192 : again, LEN - 8192, t, "the second view");
        fill(data, LEN - 8192, t + 1);
        mine++;
        h->turn = t + 1;
        nap_us(1000);
        if (!strcmp(kind, "memfd")) EQ(fcntl(fd, F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW);
        if (id >= 0 && strcmp(kind, "sysvgone")) {
            struct shmid_ds ds;
            OK(shmctl(id, IPC_STAT, &ds));
            EQ(ds.shm_nattch, 2 * NP);
            EQ(ds.shm_segsz, LEN);
            EQ(ds.shm_perm.mode & 0777, 0640);
            EQ(shmget(0x62650000 + (getpid() & 0xffff), 0, 0), id);
        }
        if (fd >= 0) {
            uint64_t w;
            EQ(pread(fd, &w, 8, 0), 8);
        }
    }
    h->ending = 1;
    for (int k = 1; k < NP; k++) reap(kid[k], 0);
    EQ(h->by[1] + h->by[2] + mine, h->turn);
    if (!strcmp(kind, "file")) unlink(path);
    if (!strcmp(kind, "shm")) shm_unlink(path);
    if (!strcmp(kind, "sysv")) OK(shmctl(id, IPC_RMID, NULL));
    return finish();
}
