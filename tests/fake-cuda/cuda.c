// A stand-in for libcuda.so.1: device memory is a mapping of the file /dev/nvidia0, kernels run on a thread, and
// another process may have the state taken off the device and put back, as NVIDIA's driver does (CUDA Driver API, "CUDA
// Checkpointing").
//
// FAKE_CUDA_GPU, or the file /tmp/fake-cuda-gpus: of each GPU a letter, of which the UUID consists, and the name of its kind
// ("a Fake GPU,b Fake GPU"); what the program makes is on the first one that CUDA_VISIBLE_DEVICES shows it. FAKE_CUDA: what goes wrong, and how often: NAME or NAME:TIMES. lock (its work does not end), denied (not to be locked at all), checkpoint
// (refused; who asks again makes it FAILED), short (the host has no memory for its state), fail (FAILED), slow (the state is taken off, and put back, in 0.2 s),
// long (the same in 65 s), whole (the wait of its thread is not to be
// interrupted), crash (it ends by SIGSEGV when the state is taken off), hang (slow, and who asks a process that ends then has no answer).
// single (a GPU has room for one process),
// shared (processes of one process group share memory of the device: while one is not running, any call about another one waits).
// FAKE_CUDA_FULL: a file; where it is there, the device has no memory for who comes back, who then never comes back at all. Where
// "once" stands in it, it goes with that.
#define _GNU_SOURCE
#include "cuda.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#define API __attribute__((visibility("default"))) CUresult
#define DEVICE "/dev/nvidia0"
enum { LOCK = 1, CHECKPOINT, RESTORE, UNLOCK };
enum { ALLOCATIONS = 64, QUEUE = 64, GPUS = 8 };
// Addresses that the driver has reserved, where it makes contexts.
#define RESERVED ((void *)0x200000000)
#define RESERVED_BYTES ((size_t)4 << 30)

// What another process reads and writes. Its place in the library is the same in both.
static struct {
    // Number of the last command << 8 | what is asked; the same of the last that was answered.
    _Atomic uint32_t asked, answered;
    uint32_t timeout_ms;
    _Atomic uint32_t result, state;
    // The letter of its GPU; of each GPU of the host, that it was not to see too, the letter and what its kind comes to.
    uint32_t gpu, gpus[GPUS], kinds[GPUS];
    // The thread that serves.
    _Atomic uint32_t thread;
    // It has failed to come back, and never will.
    uint32_t is_spent;
} control __attribute__((aligned(4096)));

struct allocation {
    char *at;
    size_t bytes;
    void *saved;  // off the device
};
static struct allocation allocations[ALLOCATIONS];
static struct { CUdeviceptr at; size_t words; } queue[QUEUE];
static unsigned submitted, done;
static int is_ready, device = -1, resting, own_pid, has_reserved;
static char own_name[16];
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

static void nap(long us) {
    struct timespec t = {0, us * 1000};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

// Whether this is to go wrong now.
static int fault(const char *name) {
    static char left[64];
    if (!left[0]) {
        const char *e = getenv("FAKE_CUDA");
        snprintf(left, sizeof left, "%s", e ? e : "-");
    }
    size_t n = strlen(name);
    if (strncmp(left, name, n)) return 0;
    if (left[n] != ':') return left[n] == 0;
    int times = atoi(left + n + 1);
    if (times <= 0) return 0;
    snprintf(left + n, sizeof left - n, ":%d", times - 1);
    return 1;
}

static int is_full(void) {
    const char *file = getenv("FAKE_CUDA_FULL");
    FILE *there = file ? fopen(file, "re") : NULL;
    char how[8] = "";
    if (!there) return 0;
    if (fgets(how, sizeof how, there) && !strcmp(how, "once")) remove(file);
    fclose(there);
    return 1;
}

// As in NVIDIA's driver, calls go on also where the threads that are held back are stopped: who wakes them waits for
// nobody, and a condition variable of the C library may wait until those it has woken have run.
static void set_running(void) {
    control.state = RUNNING;
    syscall(SYS_futex, &control.state, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

// Waits while calls are held back. The caller has the lock.
static void await_running(void) {
    for (uint32_t state; (state = control.state) != RUNNING;) {
        pthread_mutex_unlock(&gate);
        syscall(SYS_futex, &control.state, FUTEX_WAIT_PRIVATE, state, NULL, NULL, 0);
        pthread_mutex_lock(&gate);
    }
}

// Each call of the program.
static void enter(void) {
    pthread_mutex_lock(&gate);
    await_running();
}
static CUresult leave(CUresult result) {
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&gate);
    return result;
}

static void *compute(void *unused) {
    (void)unused;
    pthread_mutex_lock(&gate);
    for (;;) {
        while (done == submitted) pthread_cond_wait(&moved, &gate);
        uint32_t *words = (uint32_t *)queue[done % QUEUE].at;
        size_t n = queue[done % QUEUE].words;
        pthread_mutex_unlock(&gate);
        for (size_t i = 0; i < n; i++) {
            words[i]++;
            if (i % (n / 8 + 1) == n / 8) nap(100);
        }
        pthread_mutex_lock(&gate);
        done++;
        pthread_cond_broadcast(&moved);
    }
    return NULL;
}

static CUresult lock(void) {
    if (control.state != RUNNING) return CUDA_ERROR_ILLEGAL_STATE;
    if (fault("denied")) return CUDA_ERROR_NOT_SUPPORTED;
    if (fault("lock")) {
        nap(control.timeout_ms * 1000L > 900000000L ? 900000 : control.timeout_ms * 1000L % 1000000);
        return CUDA_ERROR_NOT_READY;
    }
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += control.timeout_ms / 1000;
    end.tv_nsec += control.timeout_ms % 1000 * 1000000L;
    if (end.tv_nsec >= 1000000000L) end.tv_sec++, end.tv_nsec -= 1000000000L;
    control.state = LOCKED;
    while (done != submitted)
        if (pthread_cond_timedwait(&moved, &gate, &end) == ETIMEDOUT) {
            set_running();
            return CUDA_ERROR_NOT_READY;
        }
    return CUDA_SUCCESS;
}

static CUresult checkpoint(void) {
    if (control.state != LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    // As the driver of r580: who asks a second time loses the program.
    static int times_refused;
    if (fault("checkpoint") && !times_refused++) return CUDA_ERROR_NOT_SUPPORTED;
    if (times_refused > 1) {
        control.state = FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    if (fault("short")) return CUDA_ERROR_OUT_OF_MEMORY;
    if (fault("fail")) {
        control.state = FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    if (fault("slow") || fault("hang")) nap(200000);
    static int *volatile nowhere;
    if (fault("crash")) *nowhere = 0;
    for (int left = fault("long") ? 130 : 0; left > 0; left--) nap(500000);
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++) {
        if (!a->at) continue;
        // Not by malloc: a thread that stands still may have its locks.
        a->saved = mmap(NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (a->saved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
        memcpy(a->saved, a->at, a->bytes);
        memset(a->at, 0xdd, a->bytes);  // the device forgets
    }
    // Only now: nothing of this is to lie where the device was.
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
        if (a->at) munmap(a->at, a->bytes);
    close(device);
    device = -1;
    control.state = CHECKPOINTED;
    return CUDA_SUCCESS;
}

// A place in the file that nobody else has: every process has a part of it.
static int map(struct allocation *a, int fixed) {
    static off_t next;
    if (!next || fixed) {
        struct stat namespace;  // hosts of a test have one device, and the same numbers
        if (stat("/proc/self/ns/pid", &namespace)) return -1;
        next = ((off_t)(namespace.st_ino % 1021) << 46) + ((off_t)getpid() << 24);
    }
    off_t place = next + (off_t)(a - allocations) * (1 << 18);
    if (a->bytes > 1 << 18 || ftruncate(device, (off_t)1 << 57)) return -1;
    char *at = mmap(fixed ? a->at : NULL, a->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (fixed ? MAP_FIXED_NOREPLACE : 0), device, place);
    if (at == MAP_FAILED) return -1;
    a->at = at;
    return 0;
}

// Whether there is room on the device: with `single` for one process.
static int fits(void) {
    struct flock own = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = ((off_t)1 << 58) + control.gpu, .l_len = 1};
    return !fault("single") || !fcntl(device, F_OFD_SETLK, &own);
}

// Whether the process is what it was: its numbers, the name of the driver's thread (which tells descriptors), that one's
// descriptor, and the addresses that are reserved.
static int is_same(void) {
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    return getpid() == own_pid && (uint32_t)gettid() == control.thread && !strcmp(name, own_name) && fcntl(resting, F_GETFD) >= 0 &&
           (!has_reserved || !msync(RESERVED, RESERVED_BYTES, MS_ASYNC));
}

static CUresult restore(void) {
    if (control.state != CHECKPOINTED) return CUDA_ERROR_ILLEGAL_STATE;
    if (!is_same()) {
        control.state = FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    // As the driver of r580: what has failed once fails for good.
    if (fault("slow")) nap(200000);
    if (control.is_spent) return CUDA_ERROR_OPERATING_SYSTEM;
    if (is_full()) {
        control.is_spent = 1;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    device = open(DEVICE, O_RDWR | O_CLOEXEC);
    if (device < 0) return CUDA_ERROR_NO_DEVICE;
    if (!fits()) {
        control.is_spent = 1;
        close(device);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++) {
        if (!a->at) continue;
        if (map(a, 1)) {
            control.state = FAILED;
            return CUDA_ERROR_UNKNOWN;
        }
        memcpy(a->at, a->saved, a->bytes);
        munmap(a->saved, a->bytes);
        a->saved = NULL;
    }
    control.state = LOCKED;
    return CUDA_SUCCESS;
}

static CUresult unlock(void) {
    if (control.state != LOCKED) return CUDA_ERROR_ILLEGAL_STATE;
    set_running();
    return CUDA_SUCCESS;
}

// A wait that tells of any interruption: job control is one, too, and a tracer that dies may be.
static void rest(void) {
    struct epoll_event e;
    if (epoll_wait(resting, &e, 1, 1) != 0 && (errno != EINTR || fault("whole"))) abort();
}

// Serves other processes. It must run for that.
static void *serve(void *unused) {
    (void)unused;
    control.thread = (uint32_t)gettid();
    for (;; rest()) {
        uint32_t asked = control.asked;
        if (asked == control.answered) continue;
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        // While calls are held back nobody else touches what all but the first do, and whoever has the lock may stand still.
        int alone = (asked & 0xff) != LOCK;
        if (!alone) pthread_mutex_lock(&gate);
        switch (asked & 0xff) {
            case LOCK: result = lock(); break;
            case CHECKPOINT: result = checkpoint(); break;
            case RESTORE: result = restore(); break;
            case UNLOCK: result = unlock(); break;
        }
        if (!alone) pthread_mutex_unlock(&gate);
        control.result = (uint32_t)result;
        control.answered = asked;
    }
    return NULL;
}

static int is_initialised;
API cuInit(unsigned flags) {
    (void)flags;
    is_initialised = 1;
    return CUDA_SUCCESS;
}

API cuGetErrorString(CUresult code, const char **text) {
    static const struct { CUresult code; const char *text; } all[] = {
        {CUDA_ERROR_INVALID_VALUE, "invalid argument"}, {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "initialization error"}, {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
        {CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"}, {CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"},
        {CUDA_ERROR_NOT_READY, "device not ready"}, {CUDA_ERROR_NOT_SUPPORTED, "operation not supported"}, {CUDA_ERROR_UNKNOWN, "unknown error"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].code == code) return *text = all[i].text, CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}

// The letter of the GPU of this number, and its kind; 0 where there are not so many.
static int gpu(int number, char *kind, size_t room) {
    char text[256] = "", *rest = text;
    FILE *own = fopen("/tmp/fake-cuda-gpus", "re");
    const char *named = getenv("FAKE_CUDA_GPU");
    if (own && !fgets(text, sizeof text, own)) text[0] = 0;
    if (own) fclose(own);
    else snprintf(text, sizeof text, "%s", named ? named : "a Fake GPU");
    char *one = strsep(&rest, ",\n");
    for (; one && number > 0; number--) one = strsep(&rest, ",\n");
    if (!one || strlen(one) < 3) return 0;
    snprintf(kind, room, "%s", one + 2);
    return one[0];
}
// The same of those that CUDA_VISIBLE_DEVICES shows, by their places, up to the first that is none.
static int seen_gpu(int number, char *kind, size_t room) {
    const char *named = getenv("CUDA_VISIBLE_DEVICES");
    char text[64], *rest = text, *end;
    if (!named) return gpu(number, kind, room);
    snprintf(text, sizeof text, "%s", named);
    for (char *one = strsep(&rest, ","); one; one = strsep(&rest, ",")) {
        long place = strtol(one, &end, 10);
        if (end == one || *end || place < 0) return 0;
        if (number-- == 0) return gpu((int)place, kind, room);
    }
    return 0;
}
// What a kind comes to: as good as its name.
static uint32_t told(const char *kind) {
    uint32_t sum = 5381;
    for (; *kind; kind++) sum = sum * 33 + (uint8_t)*kind;
    return sum;
}
// What the kind of the GPU of this letter comes to; 0 where there is none.
static uint32_t kind_of(uint32_t letter) {
    char kind[64];
    int n = 0, there;
    while ((there = gpu(n++, kind, sizeof kind)))
        if ((uint32_t)there == letter) return told(kind);
    return 0;
}
API cuDeviceGetCount(int *count) {
    char kind[64];
    for (*count = 0; seen_gpu(*count, kind, sizeof kind);) ++*count;
    return CUDA_SUCCESS;
}
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice of) {
    char kind[64];
    int letter = seen_gpu(of, kind, sizeof kind);
    memset(uuid, letter, sizeof *uuid);
    return letter ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API cuDeviceGetName(char *name, int room, CUdevice of) {
    return seen_gpu(of, name, (size_t)room) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API cuDeviceGet(CUdevice *at, int ordinal) {
    char kind[64];
    *at = ordinal;
    return seen_gpu(ordinal, kind, sizeof kind) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice ordinal) {
    (void)flags, (void)ordinal;
    pthread_t thread;
    char kind[64];
    enter();
    if (!is_ready) {
        device = open(DEVICE, O_RDWR | O_CLOEXEC);
        if (device < 0) return leave(CUDA_ERROR_NO_DEVICE);
        resting = epoll_create1(EPOLL_CLOEXEC);
        if (pthread_create(&thread, NULL, compute, NULL)) return leave(CUDA_ERROR_UNKNOWN);
        if (pthread_create(&thread, NULL, serve, NULL)) return leave(CUDA_ERROR_UNKNOWN);
        // As the driver's own: it tells two descriptors.
        snprintf(own_name, sizeof own_name, "cuda%011x", (unsigned)device);
        pthread_setname_np(thread, own_name);
        own_pid = getpid();
        has_reserved = mmap(RESERVED, RESERVED_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) == RESERVED;
        for (int i = 0; i < GPUS && (control.gpus[i] = (uint32_t)gpu(i, kind, sizeof kind)); i++) control.kinds[i] = told(kind);
        control.gpu = (uint32_t)seen_gpu(0, kind, sizeof kind);
        if (!control.gpu) return leave(CUDA_ERROR_NO_DEVICE);
        if (!fits()) return leave(CUDA_ERROR_OUT_OF_MEMORY);
        is_ready = 1;
    }
    *context = (CUcontext)&control;
    return leave(CUDA_SUCCESS);
}

API cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
    enter();
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++) {
        if (a->at) continue;
        a->bytes = bytes;
        if (map(a, 0)) return leave(CUDA_ERROR_OUT_OF_MEMORY);
        *at = (CUdeviceptr)a->at;
        return leave(CUDA_SUCCESS);
    }
    return leave(CUDA_ERROR_OUT_OF_MEMORY);
}

API cuMemFree_v2(CUdeviceptr at) {
    enter();
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++) {
        if ((CUdeviceptr)a->at != at) continue;
        munmap(a->at, a->bytes);
        *a = (struct allocation){0};
        return leave(CUDA_SUCCESS);
    }
    return leave(CUDA_ERROR_INVALID_VALUE);
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    enter();
    memcpy((void *)to, from, bytes);
    return leave(CUDA_SUCCESS);
}

// In the order of what was submitted before.
API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    CUresult result = cuCtxSynchronize();
    if (result) return result;
    enter();
    memcpy(to, (void *)from, bytes);
    return leave(CUDA_SUCCESS);
}

API fakeLaunchAdd(CUdeviceptr at, size_t words) {
    enter();
    while (submitted - done == QUEUE) {
        pthread_cond_wait(&moved, &gate);
        await_running();
    }
    queue[submitted % QUEUE].at = at;
    queue[submitted % QUEUE].words = words;
    submitted++;
    return leave(CUDA_SUCCESS);
}

// What the driver does not hold back: it looks at the device, and ends by SIGSEGV where the process is off it.
API fakeHealth(uint32_t *seen) {
    struct allocation *first = allocations;
    if (first->at) *seen = *(volatile uint32_t *)first->at;
    return CUDA_SUCCESS;
}

API cuCtxSynchronize(void) {
    enter();
    unsigned until = submitted;
    while ((int)(done - until) < 0) pthread_cond_wait(&moved, &gate);
    return leave(CUDA_SUCCESS);
}

// Where this library begins in a process; 0 where it is not.
static uintptr_t base(int pid) {
    char path[64], line[4352];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    uintptr_t found = 0;
    while (maps && !found && fgets(line, sizeof line, maps)) {
        unsigned long start, offset;
        if (strstr(line, "/libcuda.so.1") && sscanf(line, "%lx-%*x %*s %lx", &start, &offset) == 2 && offset == 0) found = start;
    }
    if (maps) fclose(maps);
    return found;
}

static int access_control(int pid, size_t offset, void *word, int write) {
    uintptr_t there = base(pid), here = base(getpid());
    if (!there || !here) return -1;
    struct iovec own = {word, 4}, other = {(char *)((uintptr_t)&control - here + there) + offset, 4};
    ssize_t n = write ? process_vm_writev(pid, &own, 1, &other, 1, 0) : process_vm_readv(pid, &own, 1, &other, 1, 0);
    return n == 4 ? 0 : -1;
}
#define GET(pid, field, word) access_control(pid, (size_t)((char *)&control.field - (char *)&control), word, 0)
#define PUT(pid, field, word) access_control(pid, (size_t)((char *)&control.field - (char *)&control), word, 1)

// Whether another process of the same group is locked, or off the device.
static int others_rest(int pid) {
    DIR *all = opendir("/proc");
    struct dirent *e;
    int rest = 0;
    while (all && !rest && (e = readdir(all))) {
        int other = atoi(e->d_name);
        uint32_t state;
        if (other <= 0 || other == pid || other == getpid() || getpgid(other) != getpgid(pid)) continue;
        rest = !GET(other, state, &state) && state != RUNNING;
    }
    if (all) closedir(all);
    return rest;
}

// Held by a call about one process while others are not to change.
static pthread_mutex_t alone = PTHREAD_MUTEX_INITIALIZER;

// Waits as the driver of r575 does where processes share memory.
static void begin_alone(int pid) {
    pthread_mutex_lock(&alone);
    while (fault("shared") && others_rest(pid)) {
        pthread_mutex_unlock(&alone);
        nap(20000);
        pthread_mutex_lock(&alone);
    }
    if (!fault("shared")) pthread_mutex_unlock(&alone);
}
static CUresult end_alone(CUresult result) {
    if (fault("shared")) pthread_mutex_unlock(&alone);
    return result;
}

static CUresult ask_now(int pid, uint32_t what, uint32_t timeout_ms) {
    uint32_t asked, answered, result;
    if (GET(pid, asked, &asked)) return CUDA_ERROR_INVALID_VALUE;
    asked = ((asked >> 8) + 1) << 8 | what;
    if (PUT(pid, timeout_ms, &timeout_ms) || PUT(pid, asked, &asked)) return CUDA_ERROR_INVALID_VALUE;
    do {
        nap(300);
        if (GET(pid, answered, &answered)) {
            while (fault("hang")) nap(100000);
            return CUDA_ERROR_INVALID_VALUE;
        }
    } while (answered != asked);
    return GET(pid, result, &result) ? CUDA_ERROR_INVALID_VALUE : (CUresult)result;
}

static CUresult ask(int pid, uint32_t what, uint32_t timeout_ms) {
    begin_alone(pid);
    return end_alone(ask_now(pid, what, timeout_ms));
}

// Whether the process has the driver's thread: one that was forked has not.
static int has_thread(int pid) {
    char path[64];
    uint32_t thread;
    if (GET(pid, thread, &thread) || thread == 0) return 0;
    snprintf(path, sizeof path, "/proc/%d/task/%u", pid, thread);
    return !access(path, F_OK);
}

static int is_zero(const struct arguments *a, int from) {
    const uint32_t *words = (const uint32_t *)a;
    for (int i = from; i < 16; i++)
        if (words[i]) return 0;
    return 1;
}

API cuCheckpointProcessGetState(int pid, int *state) {
    uint32_t word;
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    begin_alone(pid);
    if (end_alone(GET(pid, state, &word)) || !has_thread(pid)) return CUDA_ERROR_INVALID_VALUE;
    *state = (int)word;
    return CUDA_SUCCESS;
}
API cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    uint32_t word;
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (!has_thread(pid) || GET(pid, thread, &word)) return CUDA_ERROR_INVALID_VALUE;
    *tid = (int)word;
    return CUDA_SUCCESS;
}
// Asks, with arguments of which the first words have a meaning.
static CUresult ask_with(int pid, uint32_t what, struct arguments *a, int known) {
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    return is_zero(a, known) ? ask(pid, what, known ? a->timeout_ms : 0) : CUDA_ERROR_INVALID_VALUE;
}
API cuCheckpointProcessLock(int pid, struct arguments *a) { return ask_with(pid, LOCK, a, 1); }
API cuCheckpointProcessCheckpoint(int pid, struct arguments *a) { return ask_with(pid, CHECKPOINT, a, 0); }
API cuCheckpointProcessUnlock(int pid, struct arguments *a) { return ask_with(pid, UNLOCK, a, 0); }

// Where the GPU of this letter goes; 0 where that is not said, or cannot be: it is not here, of another kind, or goes to somebody else.
static uint32_t place_of(const struct restore_arguments *a, uint32_t letter, uint32_t kind) {
    uint32_t place = 0;
    for (uint32_t i = 0; i < a->count; i++)
        if ((uint32_t)a->pairs[i].old.bytes[15] == letter) place = (uint32_t)a->pairs[i].new.bytes[15];
    for (uint32_t i = 0; i < a->count; i++)
        if ((uint32_t)a->pairs[i].new.bytes[15] == place && (uint32_t)a->pairs[i].old.bytes[15] != letter) return 0;
    return place && kind_of(place) == kind ? place : 0;
}
API cuCheckpointProcessRestore(int pid, struct restore_arguments *a) {
    uint32_t had, letter, kind, spent = 1, places[GPUS] = {0};
    if (!is_initialised) return PUT(pid, is_spent, &spent), CUDA_ERROR_NOT_INITIALIZED;
    for (int i = 0; i < 13; i++)
        if (a->rest[i]) return CUDA_ERROR_INVALID_VALUE;
    if (GET(pid, gpu, &had)) return CUDA_ERROR_INVALID_VALUE;
    uint32_t own = had;
    // Every GPU that the driver had seen must be named, or none.
    for (int i = 0; i < GPUS && a->count > 0; i++) {
        if (GET(pid, gpus[i], &letter) || GET(pid, kinds[i], &kind)) return CUDA_ERROR_INVALID_VALUE;
        if (!letter) break;
        places[i] = place_of(a, letter, kind);
        if (!places[i]) return CUDA_ERROR_INVALID_VALUE;
        if (letter == had) own = places[i];
    }
    if (!kind_of(own)) return CUDA_ERROR_NO_DEVICE;
    for (int i = 0; i < GPUS && places[i]; i++)
        if (PUT(pid, gpus[i], &places[i])) return CUDA_ERROR_INVALID_VALUE;
    return PUT(pid, gpu, &own) ? CUDA_ERROR_INVALID_VALUE : ask(pid, RESTORE, 0);
}
