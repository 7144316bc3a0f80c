// Questions to the daemon over the context's socket, and the bell that says where new work is.
#include "fv.h"
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

// The host on which this process believes to be: FAKE_VERBS_HOST, or the machine's name.
const char *fv_host(void) {
    static char name[FV_HOST_MAX];
    const char *host = getenv("FAKE_VERBS_HOST");
    if (host && *host) return host;
    if (gethostname(name, sizeof name - 1)) return "host";
    return name;
}

// A new connection to the fabric of FAKE_VERBS_DIR, or -1.
int fv_connect(void) {
    const char *dir = getenv("FAKE_VERBS_DIR");
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (!dir || snprintf(a.sun_path, sizeof a.sun_path, "%s/" FV_SOCKET, dir) >= (int)sizeof a.sun_path) return -1;
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s >= 0 && connect(s, (struct sockaddr *)&a, sizeof a)) {
        close(s);
        s = -1;
    }
    return s;
}

int fv_ask_on(int sock, const struct fv_request *q, const int *fds, int count, struct fv_reply *a) {
    struct iovec iov = {(void *)q, sizeof *q};
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(4 * sizeof(int))];
    } control = {0};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (count) {
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(&control.head), fds, (size_t)count * sizeof(int));
    }
    ssize_t r;
    do r = sendmsg(sock, &m, MSG_NOSIGNAL);
    while (r < 0 && errno == EINTR);
    if (r != (ssize_t)sizeof *q) return EIO;
    do r = recv(sock, a, sizeof *a, 0);
    while (r < 0 && errno == EINTR);
    return r == (ssize_t)sizeof *a ? a->error : EIO;
}

int fv_ask(struct fv_ctx *c, const struct fv_request *q, const int *fds, int count, struct fv_reply *a) {
    pthread_mutex_lock(&c->asking);
    int r = fv_ask_on(c->verbs.context.cmd_fd, q, fds, count, a);
    pthread_mutex_unlock(&c->asking);
    return r;
}

// Memory that the daemon can map too. Its name is what mappings of a real adapter are called.
void *fv_share(size_t bytes, int *fd) {
    *fd = memfd_create("infiniband/uverbs0", MFD_CLOEXEC);
    if (*fd < 0) return NULL;
    void *p = ftruncate(*fd, (off_t)bytes) ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (p == MAP_FAILED) {
        close(*fd);
        *fd = -1;
        return NULL;
    }
    // As for the rings of real providers: a child that fork makes must not touch them.
    madvise(p, bytes, MADV_DONTFORK);
    return p;
}

// Tells the daemon of new work in a queue. Whoever finds a bell still rung need not ring it again: the daemon has yet
// to look.
static void ring_bell(struct fv_ctx *c, uint32_t handle) {
    pthread_mutex_lock(&c->ringing);
    uint32_t t = atomic_load_explicit(&c->bells->tail, memory_order_relaxed);
    c->bells->ring[t % FV_BELLS] = handle;
    atomic_store(&c->bells->tail, t + 1);
    pthread_mutex_unlock(&c->ringing);
    if (atomic_exchange(&c->bells->bell, 1)) return;
    ssize_t r;
    do r = send(c->verbs.context.cmd_fd, "", 1, MSG_NOSIGNAL);
    while (r < 0 && errno == EINTR);
}

void fv_ring(struct fv_ctx *c, uint32_t handle, struct fv_queue *q) {
    int cancelled;
    if (atomic_exchange(&q->belled, 1)) return;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled);
    ring_bell(c, handle);
    pthread_setcancelstate(cancelled, NULL);
    // As with providers that write to the kernel, a thread that was told to end may do so here.
    pthread_testcancel();
}

// Puts an object where events find it.
int fv_remember(struct fv_ctx *c, uint32_t handle, void *object) {
    pthread_mutex_lock(&c->asking);
    if (handle >= c->object_count) {
        uint32_t n = fv_slots(handle + 1) < 64 ? 64 : fv_slots(handle + 1);
        void **more = realloc(c->objects, n * sizeof *more);
        if (!more) {
            pthread_mutex_unlock(&c->asking);
            return ENOMEM;
        }
        memset(more + c->object_count, 0, (n - c->object_count) * sizeof *more);
        c->objects = more;
        c->object_count = n;
    }
    c->objects[handle] = object;
    pthread_mutex_unlock(&c->asking);
    return 0;
}

void fv_forget(struct fv_ctx *c, uint32_t handle) {
    pthread_mutex_lock(&c->asking);
    if (handle < c->object_count) c->objects[handle] = NULL;
    pthread_mutex_unlock(&c->asking);
}
