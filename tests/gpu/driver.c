// What NVIDIA's driver itself takes for the steps of a checkpoint, asked of this process: driver BYTES [RUNS].
// One line for each run: seconds of lock, checkpoint, restore and unlock; and of bare copies to pinned and from it.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#define CU(call) do { CUresult e_ = (call); if (e_ != CUDA_SUCCESS) { const char *t_ = ""; cuGetErrorString(e_, &t_); fprintf(stderr, "%s: %s (%d)\n", #call, t_, (int)e_); exit(1); } } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 1 << 30;
    int runs = argc > 2 ? atoi(argv[2]) : 3;
    CUdevice device;
    CUcontext context;
    CUdeviceptr at;
    double t = now();
    CU(cuInit(0));
    double init = now() - t;
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuMemAlloc(&at, bytes));
    CU(cuMemsetD32(at, 0x12345678, bytes / 4));
    CU(cuCtxSynchronize());
    printf("init %.3f s\n", init);
    void *pinned;
    size_t piece = bytes < (1u << 30) ? bytes : 1u << 30;
    CU(cuMemHostAlloc(&pinned, piece, 0));
    for (int run = 0; run < runs; run++) {
        t = now();
        for (size_t done = 0; done < bytes; done += piece) CU(cuMemcpyDtoH(pinned, at + done, bytes - done < piece ? bytes - done : piece));
        double off = now() - t;
        t = now();
        for (size_t done = 0; done < bytes; done += piece) CU(cuMemcpyHtoD(at + done, pinned, bytes - done < piece ? bytes - done : piece));
        printf("bytes %zu off %.4f on %.4f\n", bytes, off, now() - t);
    }
    CU(cuMemFreeHost(pinned));
    for (int run = 0; run < runs; run++) {
        CUcheckpointLockArgs lock = {0};
        CUcheckpointCheckpointArgs checkpoint = {0};
        CUcheckpointRestoreArgs restore = {0};
        CUcheckpointUnlockArgs unlock = {0};
        double at0 = now();
        CU(cuCheckpointProcessLock(getpid(), &lock));
        double at1 = now();
        CU(cuCheckpointProcessCheckpoint(getpid(), &checkpoint));
        double at2 = now();
        CU(cuCheckpointProcessRestore(getpid(), &restore));
        double at3 = now();
        CU(cuCheckpointProcessUnlock(getpid(), &unlock));
        double at4 = now();
        printf("bytes %zu lock %.4f checkpoint %.4f restore %.4f unlock %.4f\n", bytes, at1 - at0, at2 - at1, at3 - at2, at4 - at3);
        fflush(stdout);
    }
    return 0;
}
