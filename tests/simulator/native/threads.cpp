// A client of the driver with several host threads, for the sanitizers: dlopen, cuGetProcAddress, streams, events,
// copies and kernels, in every schedule.  Prints "clean" when every value is right and the simulator has nothing to report.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "simcuda.h"

namespace {

void *library;

[[noreturn]] void fail(const char *what, int code)
{
    std::printf("%s: %d\n", what, code);
    std::exit(1);
}

template <class F>
F *control(const char *name)
{
    void *address = dlsym(library, name);
    if (address == nullptr)
        fail(name, -1);
    return reinterpret_cast<F *>(address);
}

// Looks the function up as the extension does, calls it, and ends the program when it fails.
template <class... A, class... B>
void call(const char *name, CUresult (*)(A...), B... arguments)
{
    static auto *resolve = control<CUresult(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *)>(
        "cuGetProcAddress_v2");
    void *address = nullptr;
    resolve(name, &address, 12000, 0, nullptr);
    if (address == nullptr)
        fail(name, -1);
    if (const CUresult code = reinterpret_cast<CUresult (*)(A...)>(address)(static_cast<A>(arguments)...))
        fail(name, code);
}

#define CALL(name, ...) call(#name, static_cast<decltype(&name)>(nullptr), __VA_ARGS__)

const char kIncrement[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry increment(.param .u64 p, .param .u32 n)
{
    .reg .pred %p; .reg .b32 %r<5>; .reg .b64 %d<2>;
    ld.param.u64 %d0, [p]; ld.param.u32 %r0, [n];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
    setp.ge.u32 %p, %r1, %r0; @%p ret;
    mad.wide.u32 %d0, %r1, 4, %d0;
    ld.global.u32 %r4, [%d0]; add.u32 %r4, %r4, 1; st.global.u32 [%d0], %r4;
    ret;
}
)";

constexpr unsigned kWords = 1000, kSteps = 10;

// Copies in, increments on two streams in turns, copies out.
void work(CUcontext context, CUfunction function)
{
    CUstream streams[2];
    CUevent done;
    CUdeviceptr memory;
    void *pinned;
    CALL(cuCtxSetCurrent, context);
    for (CUstream &stream : streams)
        CALL(cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, 0);
    CALL(cuEventCreate, &done, CU_EVENT_DISABLE_TIMING);
    CALL(cuMemAlloc, &memory, kWords * 4);
    CALL(cuMemHostAlloc, &pinned, kWords * 4, 0);
    std::memset(pinned, 0, kWords * 4);
    CALL(cuMemcpyHtoDAsync, memory, pinned, kWords * 4, streams[0]);
    for (unsigned i = 0; i < kSteps; i++) {
        unsigned n = kWords;
        void *parameters[] = {&memory, &n};
        CALL(cuLaunchKernel, function, 8, 1, 1, 128, 1, 1, 0, streams[i % 2], parameters, nullptr);
        CALL(cuEventRecord, done, streams[i % 2]);
        CALL(cuStreamWaitEvent, streams[(i + 1) % 2], done, 0);
    }
    CALL(cuMemcpyDtoHAsync, pinned, memory, kWords * 4, streams[kSteps % 2]);
    CALL(cuStreamSynchronize, streams[kSteps % 2]);
    for (unsigned i = 0; i < kWords; i++)
        if (static_cast<uint32_t *>(pinned)[i] != kSteps)
            fail("a wrong value", static_cast<int>(i));
    CALL(cuMemFree, memory);
    CALL(cuMemFreeHost, pinned);
    CALL(cuEventDestroy, done);
    for (CUstream stream : streams)
        CALL(cuStreamDestroy, stream);
}

void run(int schedule)
{
    control<void(int, uint64_t)>("sim_reset")(schedule, 1);
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CALL(cuInit, 0u);
    CALL(cuDevicePrimaryCtxRetain, &context, 0);
    CALL(cuCtxSetCurrent, context);
    CALL(cuModuleLoadData, &module, kIncrement);
    CALL(cuModuleGetFunction, &function, module, "increment");
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back(work, context, function);
    for (std::thread &thread : threads)
        thread.join();
    CALL(cuModuleUnload, module);
    CALL(cuDevicePrimaryCtxRelease, 0);
    for (const char *name : {"sim_report", "sim_leaks"}) {
        const char *text = control<const char *()>(name)();
        if (*text) {
            std::printf("schedule %d, %s: %s\n", schedule, name, text);
            std::exit(1);
        }
    }
}

} // namespace

int main(int argc, char **argv)
{
    library = dlopen(argc > 1 ? argv[1] : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::puts(dlerror());
        return 2;
    }
    for (int schedule : {SIM_EAGER, SIM_LAZY, SIM_RANDOM, SIM_THREAD})
        run(schedule);
    std::puts("clean");
    return 0;
}
