// Computes on a GPU and compares with what must have been computed: work [bytes=N] [part=P] [WORD...]
//
// All data is words that each round turns by one affine map modulo 2^32, so what any word must be after any number of
// rounds is known without a copy. part: percent of the data that each round changes (the rest is compared all the same).
// WORD: streams, graph, pool, pinned, vmm, managed, nvrtc, threads, blas: what else of CUDA is in use; mapping: a thread that
// has nothing to do with the GPU maps and unmaps memory all the time; endless: from the third second on a kernel runs
// until `go`.
#include <atomic>
#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <map>
#include <nvrtc.h>
#include <set>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

static const uint32_t TIMES = 1664525, PLUS = 1013904223;
static unsigned long round_number;
static double longest_round;

[[noreturn]] static void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("FAIL work: ");
    vprintf(format, list);
    printf(" (round %lu)\n", round_number);
    fflush(stdout);
    _exit(1);
}
#define RT(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) fail("line %d: %s: %s", __LINE__, #call, cudaGetErrorString(e_)); } while (0)
#define CU(call) do { CUresult e_ = (call); if (e_ != CUDA_SUCCESS) fail("line %d: %s: CUDA error %d", __LINE__, #call, (int)e_); } while (0)
#define IS(a, b) do { long long a_ = (long long)(a), b_ = (long long)(b); if (a_ != b_) fail("line %d: %s is %lld, expected %lld", __LINE__, #a, a_, b_); } while (0)

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

__host__ __device__ static uint32_t first(uint64_t i) { return (uint32_t)(i * 2654435761u ^ (i >> 7)); }

__global__ void begin_with(uint32_t *at, uint64_t words) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.x * blockDim.x) at[i] = first(i);
}
__global__ void turn(uint32_t *at, uint64_t words) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.x * blockDim.x) at[i] = at[i] * 1664525u + 1013904223u;
}
__global__ void compare(const uint32_t *at, uint64_t words, uint32_t times, uint32_t plus, unsigned long long *wrong) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words; i += (uint64_t)gridDim.x * blockDim.x)
        if (at[i] != first(i) * times + plus) atomicAdd(wrong, 1ULL);
}
__global__ void until(volatile int *end) { while (!*end) {} }

// The map that so many rounds make together.
struct Map {
    uint32_t times = 1, plus = 0;
    void turn() {
        plus = plus * TIMES + PLUS;
        times *= TIMES;
    }
};

// Words on the device, and what each of them is.
struct Data {
    uint32_t *at;
    uint64_t words;
    Map map;
    void init(void *place, uint64_t count, cudaStream_t stream = 0) {
        at = (uint32_t *)place;
        words = count;
        map = Map();
        begin_with<<<1024, 256, 0, stream>>>(at, words);
        RT(cudaGetLastError());
    }
    void step(cudaStream_t stream = 0) {
        ::turn<<<1024, 256, 0, stream>>>(at, words);
        RT(cudaGetLastError());
        map.turn();
    }
    void check(unsigned long long *wrong, const char *what) {
        *(volatile unsigned long long *)wrong = 0;
        compare<<<1024, 256>>>(at, words, map.times, map.plus, wrong);
        RT(cudaGetLastError());
        RT(cudaDeviceSynchronize());
        if (*(volatile unsigned long long *)wrong) fail("%s: %llu of %" PRIu64 " words are not what they must be", what, *wrong, words);
    }
};

static bool told_to_end() {
    const char *go = getenv("BELAY_TEST_GO");
    return go && access(go, F_OK) == 0;
}

static bool running() {
    static double last, beaten;
    double t = now();
    if (last && t - last > longest_round) longest_round = t - last;
    last = t;
    round_number++;
    if (t - beaten < 0.004) return true;
    beaten = t;
    const char *name = getenv("BELAY_TEST_BEAT");
    if (name && *name) {
        int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        char text[24];
        snprintf(text, sizeof text, "%019lu\n", round_number);
        if (fd < 0 || pwrite(fd, text, 20, 0) != 20 || close(fd)) fail("write the heartbeat");
    }
    return !told_to_end();
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t bytes = 64 << 20, part = 100;
    std::set<std::string> with;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "bytes=", 6)) bytes = strtoull(argv[i] + 6, NULL, 10);
        else if (!strncmp(argv[i], "part=", 5)) part = strtoull(argv[i] + 5, NULL, 10);
        else with.insert(argv[i]);
    }
    auto has = [&](const char *word) { return with.count(word) > 0; };

    RT(cudaSetDevice(0));
    unsigned long long *wrong;
    RT(cudaMallocHost(&wrong, sizeof *wrong));
    uint64_t words = bytes / 4, changed = words * part / 100;
    uint32_t *place;
    RT(cudaMalloc(&place, bytes));
    Data data, rest;
    data.init(place, changed);
    // What stays is numbered from its own beginning.
    if (changed < words) rest.init(place + changed, words - changed);

    std::vector<cudaStream_t> streams;
    std::vector<Data> slices;
    cudaEvent_t event, old;
    RT(cudaEventCreate(&old));
    RT(cudaEventRecord(old));
    if (has("streams")) {
        int least, greatest;
        RT(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        RT(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
        for (int i = 0; i < 4; i++) {
            cudaStream_t stream;
            RT(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, i % 2 ? least : greatest));
            streams.push_back(stream);
            void *own;
            RT(cudaMalloc(&own, 1 << 20));
            slices.emplace_back();
            slices.back().init(own, 1 << 18, stream);
        }
    }
    cudaStream_t captured;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    Data in_graph;
    if (has("graph")) {
        void *own;
        RT(cudaMalloc(&own, 1 << 20));
        RT(cudaStreamCreate(&captured));
        in_graph.init(own, 1 << 18, captured);
        RT(cudaStreamSynchronize(captured));
        RT(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
        turn<<<1024, 256, 0, captured>>>(in_graph.at, in_graph.words);
        RT(cudaStreamEndCapture(captured, &graph));
        RT(cudaGraphInstantiate(&exec, graph, 0));
    }
    Data in_pool;
    if (has("pool")) {
        void *own;
        RT(cudaMallocAsync(&own, 3 << 20, 0));
        in_pool.init(own, 3 << 18);
    }
    uint32_t *pinned = NULL, *registered = NULL;
    const int PINNED = 1 << 18;
    if (has("pinned")) {
        RT(cudaHostAlloc(&pinned, PINNED * 4, cudaHostAllocMapped));
        if (posix_memalign((void **)&registered, 4096, PINNED * 4)) fail("no memory");
        RT(cudaHostRegister(registered, PINNED * 4, cudaHostRegisterDefault));
        for (int i = 0; i < PINNED; i++) pinned[i] = registered[i] = first(i);
    }
    Map of_pinned;
    Data in_vmm;
    if (has("vmm")) {
        CUmemAllocationProp prop = {};
        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        size_t grain;
        CU(cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        CUdeviceptr at;
        CUmemGenericAllocationHandle handle;
        CU(cuMemAddressReserve(&at, 16 * grain, 0, 0, 0));
        CU(cuMemCreate(&handle, 4 * grain, &prop, 0));
        CU(cuMemMap(at + grain, 4 * grain, 0, handle, 0));
        CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CU(cuMemSetAccess(at + grain, 4 * grain, &access, 1));
        in_vmm.init((void *)(at + grain), grain);
    }
    Data in_managed;
    if (has("managed")) {
        void *own;
        RT(cudaMallocManaged(&own, 1 << 20));
        in_managed.init(own, 1 << 18);
    }
    CUfunction compiled = NULL;
    Data by_compiled;
    if (has("nvrtc")) {
        const char *source = "extern \"C\" __global__ void turned(unsigned *at, unsigned words) { unsigned i = blockIdx.x * blockDim.x + threadIdx.x; if (i < words) at[i] = at[i] * 1664525u + 1013904223u; }";
        nvrtcProgram program;
        const char *options[] = {"--gpu-architecture=compute_80"};
        size_t size;
        IS(nvrtcCreateProgram(&program, source, "turned.cu", 0, NULL, NULL), 0);
        IS(nvrtcCompileProgram(program, 1, options), 0);
        IS(nvrtcGetPTXSize(program, &size), 0);
        std::vector<char> ptx(size);
        IS(nvrtcGetPTX(program, ptx.data()), 0);
        CUmodule module;
        CU(cuModuleLoadData(&module, ptx.data()));
        CU(cuModuleGetFunction(&compiled, module, "turned"));
        void *own;
        RT(cudaMalloc(&own, 1 << 20));
        by_compiled.init(own, 1 << 18);
    }
    // Whole numbers small enough that single precision is exact.
    cublasHandle_t blas;
    float *a, *b, *c;
    const int N = 256;
    std::vector<float> product(N * N);
    if (has("blas")) {
        IS(cublasCreate(&blas), 0);
        std::vector<float> x(N * N), y(N * N);
        for (int i = 0; i < N * N; i++) x[i] = i % 7, y[i] = i % 5;
        RT(cudaMalloc(&a, N * N * 4));
        RT(cudaMalloc(&b, N * N * 4));
        RT(cudaMalloc(&c, N * N * 4));
        RT(cudaMemcpy(a, x.data(), N * N * 4, cudaMemcpyHostToDevice));
        RT(cudaMemcpy(b, y.data(), N * N * 4, cudaMemcpyHostToDevice));
    }
    // Threads with data and streams of their own, which never meet the main one.
    std::atomic<bool> end(false);
    std::vector<std::thread> threads;
    for (int i = 0; has("threads") && i < 3; i++)
        threads.emplace_back([&] {
            unsigned long long *own_wrong;
            cudaStream_t stream;
            Data own;
            void *at;
            RT(cudaSetDevice(0));
            RT(cudaMallocHost(&own_wrong, 8));
            RT(cudaStreamCreate(&stream));
            RT(cudaMalloc(&at, 1 << 20));
            own.init(at, 1 << 18, stream);
            while (!end) {
                own.step(stream);
                RT(cudaStreamSynchronize(stream));
                own.check(own_wrong, "a thread's data");
            }
        });
    if (has("mapping"))
        threads.emplace_back([&] {
            std::vector<std::pair<uint64_t *, size_t>> all;
            for (uint64_t turn = 1; !end; turn++) {
                size_t size = (1 + turn * 2654435761u % 48) << 12;
                uint64_t *at = (uint64_t *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (at == MAP_FAILED) fail("map memory");
                for (size_t i = 0; i < size / 8; i += 512) {
                    if (at[i]) fail("new memory at %p is not empty", (void *)(at + i));
                    at[i] = (uintptr_t)at ^ i;
                }
                all.emplace_back(at, size);
                if (all.size() > 1000) {
                    size_t which = turn * 40503 % all.size();
                    auto [old, bytes] = all[which];
                    for (size_t i = 0; i < bytes / 8; i += 512) IS(old[i], (uintptr_t)old ^ i);
                    munmap(old, bytes);
                    all[which] = all.back();
                    all.pop_back();
                }
                if (turn % 16 == 0) usleep(500);
            }
        });
    RT(cudaDeviceSynchronize());

    double began = now();
    volatile int *flag;
    RT(cudaHostAlloc((void **)&flag, sizeof *flag, cudaHostAllocMapped));
    *flag = 0;
    bool launched = false;
    while (running()) {
        data.step();
        for (size_t i = 0; i < streams.size(); i++) {
            slices[i].step(streams[i]);
            RT(cudaEventRecord(event, streams[i]));
            RT(cudaStreamWaitEvent(streams[(i + 1) % streams.size()], event));
        }
        if (has("graph")) {
            RT(cudaGraphLaunch(exec, captured));
            in_graph.map.turn();
        }
        if (has("pool")) {
            // What comes and goes in the pool beside what stays.
            void *passing;
            RT(cudaMallocAsync(&passing, (1 + round_number % 4) << 20, 0));
            in_pool.step();
            RT(cudaFreeAsync(passing, 0));
        }
        if (pinned) {
            turn<<<64, 256>>>(pinned, PINNED);
            turn<<<64, 256>>>(registered, PINNED);
            RT(cudaGetLastError());
            of_pinned.turn();
            RT(cudaDeviceSynchronize());
            for (int i = 0; i < PINNED; i += 97) {
                IS(pinned[i], first(i) * of_pinned.times + of_pinned.plus);
                IS(registered[i], first(i) * of_pinned.times + of_pinned.plus);
            }
        }
        if (has("vmm")) in_vmm.step();
        if (has("managed")) in_managed.step();
        if (compiled) {
            unsigned count = 1 << 18;
            void *arguments[] = {&by_compiled.at, &count};
            CU(cuLaunchKernel(compiled, count / 256, 1, 1, 256, 1, 1, 0, 0, arguments, NULL));
            by_compiled.map.turn();
        }
        if (has("blas")) {
            const float one = 1, zero = 0;
            IS(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &one, a, N, b, N, &zero, c, N), 0);
            RT(cudaMemcpy(product.data(), c, N * N * 4, cudaMemcpyDeviceToHost));
            int row = round_number % N, column = round_number * 31 % N;
            float sum = 0;
            for (int k = 0; k < N; k++) sum += (float)((row + k * N) % 7) * (float)((k + column * N) % 5);
            IS(product[row + column * N], sum);
        }
        if (round_number % 8 == 0) {
            data.check(wrong, "data");
            if (changed < words) rest.check(wrong, "what stays");
            for (auto &slice : slices) slice.check(wrong, "a stream's data");
            if (has("graph")) in_graph.check(wrong, "a graph's data");
            if (has("pool")) in_pool.check(wrong, "a pool's data");
            if (has("vmm")) in_vmm.check(wrong, "mapped data");
            if (has("managed")) in_managed.check(wrong, "managed data");
            if (compiled) by_compiled.check(wrong, "compiled kernel's data");
        }
        RT(cudaDeviceSynchronize());
        if (has("endless") && !launched && now() - began > 3) {
            until<<<1, 1>>>((volatile int *)flag);
            launched = true;
            while (!told_to_end()) running(), usleep(2000);
            *flag = 1;
            RT(cudaDeviceSynchronize());
        }
    }
    end = true;
    for (auto &thread : threads) thread.join();
    data.check(wrong, "data, at the end");
    if (changed < words) rest.check(wrong, "what stays, at the end");
    RT(cudaEventQuery(old));
    printf("rounds %lu, longest %.3f s\nPASS work\n", round_number, longest_round);
    return 0;
}
