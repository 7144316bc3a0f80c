// What the stand-in for NVIDIA's driver has of the CUDA Driver API, with its types and numbers.
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H
#include <stddef.h>
#include <stdint.h>
typedef int CUresult, CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct module *CUmodule;
typedef int (*CUfunction)(void **);
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
};
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
typedef struct {
    char bytes[16];
} CUuuid;
struct pair {
    CUuuid old, new;
};
// Arguments of the checkpoint calls: what is not named is zero.
struct arguments {
    uint32_t timeout_ms, rest[15];
};
struct restore_arguments {
    struct pair *pairs;
    uint32_t count, rest[13];
};
CUresult cuInit(unsigned flags);
CUresult cuGetErrorString(CUresult code, const char **text);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
CUresult cuDeviceGetName(char *name, int room, CUdevice device);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr at);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
// The one kernel there is: adds 1 to each of so many words, one after the other.
CUresult fakeLaunchAdd(CUdeviceptr at, size_t words);
// A look at the device that no lock holds back.
CUresult fakeHealth(uint32_t *seen);
CUresult cuCtxSynchronize(void);
CUresult cuCheckpointProcessGetState(int pid, int *state);
CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid);
CUresult cuCheckpointProcessLock(int pid, struct arguments *arguments);
CUresult cuCheckpointProcessCheckpoint(int pid, struct arguments *arguments);
CUresult cuCheckpointProcessRestore(int pid, struct restore_arguments *arguments);
CUresult cuCheckpointProcessUnlock(int pid, struct arguments *arguments);
#endif
