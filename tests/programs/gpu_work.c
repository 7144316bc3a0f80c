// Computes on a GPU (tests/fake-cuda) and compares with what must have been computed: gpu_work [kids|late|watch|poll|alone].
// kids: two children do the same. late: a child is forked when the GPU is in use already. watch: a thread looks at the device
// all the time, by a call that is not held back. poll: the same, and a request of asynchronous I/O (io_setup) waits until the end.
// alone: a thread computes, and the main thread has exited.
#include "check.h"
#include "../fake-cuda/cuda.h"
#include <dlfcn.h>
#include <linux/aio_abi.h>
enum { WORDS = 20000, BUFFERS = 3 };

static void *symbol(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) fail("%s", dlerror());
    void *found = dlsym(driver, name);
    if (!found) fail("%s", dlerror());
    return found;
}
#define CU(name, ...) do { __typeof__(name) *call_ = (__typeof__(name) *)symbol(#name); EQ(call_(__VA_ARGS__), 0); } while (0)

// What runs beside the GPU, and never waits for it.
static void *beside(void *counter) {
    for (;; nap_us(2000)) ++*(_Atomic unsigned long *)counter;
    return NULL;
}

static void *watch(void *over) {
    uint32_t seen;
    for (; !*(_Atomic int *)over; nap_us(200)) CU(fakeHealth, &seen);
    return NULL;
}

// A poll of a pipe, submitted, and its end.
static struct { aio_context_t context; struct iocb request; int ends[2]; } polled;
static void begin_poll(void) {
    OK(syscall(SYS_io_setup, 4, &polled.context));
    OK(pipe(polled.ends));
    polled.request = (struct iocb){.aio_lio_opcode = IOCB_CMD_POLL, .aio_fildes = (uint32_t)polled.ends[0], .aio_buf = POLLIN, .aio_data = 7};
    struct iocb *p = &polled.request;
    EQ(syscall(SYS_io_submit, polled.context, 1L, &p), 1);
}
static void end_poll(void) {
    struct io_event e = {0};
    struct timespec none = {0, 0};
    EQ(syscall(SYS_io_getevents, polled.context, 0L, 1L, &e, &none), 0);
    EQ(write(polled.ends[1], "x", 1), 1);
    EQ(syscall(SYS_io_getevents, polled.context, 1L, 1L, &e, NULL), 1);
    EQ(e.data, 7);
    OK(syscall(SYS_io_destroy, polled.context));
}

static void work(int late, int watched, int polls) {
    CUcontext context;
    CUdevice device;
    CUdeviceptr at[BUFFERS];
    static uint32_t seen[WORDS];
    static _Atomic unsigned long counter;
    static _Atomic int over;
    pthread_t thread, watching;
    uint32_t added[BUFFERS] = {0}, mine = (uint32_t)getpid();
    EQ(pthread_create(&thread, NULL, beside, (void *)&counter), 0);
    CU(cuInit, 0);
    CU(cuDeviceGet, &device, 0);
    CU(cuCtxCreate_v2, &context, 0, device);
    for (int b = 0; b < BUFFERS; b++) {
        for (int i = 0; i < WORDS; i++) seen[i] = mine + (uint32_t)b;
        CU(cuMemAlloc_v2, &at[b], sizeof seen);
        CU(cuMemcpyHtoD_v2, at[b], seen, sizeof seen);
    }
    if (polls) begin_poll();
    if (watched) EQ(pthread_create(&watching, NULL, watch, (void *)&over), 0);
    pid_t child = late ? (pid_t)OK(fork()) : 0;
    if (late && !child) for (;;) pause();
    for (int round = 0; running(); round++) {
        int b = round % BUFFERS;
        for (int k = 0; k < 4; k++, added[b]++) CU(fakeLaunchAdd, at[b], WORDS);
        CU(cuMemcpyDtoH_v2, seen, at[b], sizeof seen);
        for (int i = 0; i < WORDS; i++) EQ(seen[i], mine + (uint32_t)b + added[b]);
    }
    CHECK(counter > 0);
    if (late) {
        OK(kill(child, SIGKILL));
        reap(child, SIGKILL);
    }
    if (polls) end_poll();
    over = 1;
    if (watched) EQ(pthread_join(watching, NULL), 0);
    for (int b = 0; b < BUFFERS; b++) CU(cuMemFree_v2, at[b]);
}

static void *work_alone(void *none) {
    (void)none;
    work(0, 0, 0);
    exit(finish());
}

int main(int argc, char **argv) {
    begin("gpu_work");
    pid_t kids[2];
    int n = argc > 1 && !strcmp(argv[1], "kids") ? 2 : 0;
    for (int k = 0; k < n; k++) {
        kids[k] = (pid_t)OK(fork());
        if (kids[k]) continue;
        begin_child();
        work(0, 0, 0);
        _exit(0);
    }
    const char *how = argc > 1 ? argv[1] : "";
    if (!strcmp(how, "alone")) {
        pthread_t other;
        EQ(pthread_create(&other, NULL, work_alone, NULL), 0);
        pthread_exit(NULL);
    }
    int polls = !strcmp(how, "poll");
    work(!strcmp(how, "late"), !strcmp(how, "watch") || polls, polls);
    for (int k = 0; k < n; k++) {
        int status;
        EQ(waitpid(kids[k], &status, 0), kids[k]);
        EQ(status, 0);
    }
    return finish();
}
