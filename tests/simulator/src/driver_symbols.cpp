// Entry points by name and version, and the names of errors.
#include <cudaTypedefs.h>

#include <cstring>

#include "entry.hpp"
#include "state.hpp"

using namespace sim;

// ABIs that newer headers hide behind macros; older callers ask for them by version.
#undef cuStreamGetCaptureInfo
#undef cuEventElapsedTime
#undef cuGetProcAddress
extern "C" {
CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream, CUstreamCaptureStatus *, cuuint64_t *);
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *,
                                           const CUgraphNode **, size_t *);
CUresult CUDAAPI cuEventElapsedTime(float *, CUevent, CUevent);
CUresult CUDAAPI cuGetProcAddress(const char *, void **, int, cuuint64_t);
}

namespace {

struct Symbol {
    const char *name;
    int since; // the CUDA version of this ABI
    void *address;
};

// The typedef carries the version, so that a wrong one, like a wrong signature, does not compile.
#define SYMBOL(name, version) {#name, version, reinterpret_cast<void *>(static_cast<PFN_##name##_v##version>(name))}
#define SYMBOL_AS(name, version, function)                                                                             \
    {#name, version, reinterpret_cast<void *>(static_cast<PFN_##name##_v##version>(function))}

const Symbol symbols[] = {
    SYMBOL(cuInit, 2000),
    SYMBOL(cuDriverGetVersion, 2020),
    SYMBOL(cuGetErrorName, 6000),
    SYMBOL(cuGetErrorString, 6000),
    SYMBOL(cuDeviceGetCount, 2000),
    SYMBOL(cuDeviceGet, 2000),
    SYMBOL(cuDeviceGetName, 2000),
    SYMBOL(cuDeviceGetAttribute, 2000),
    SYMBOL(cuDeviceTotalMem, 3020),
    SYMBOL(cuDevicePrimaryCtxRetain, 7000),
    SYMBOL(cuDevicePrimaryCtxRelease, 11000),
    SYMBOL(cuDevicePrimaryCtxGetState, 7000),
    SYMBOL(cuCtxGetCurrent, 4000),
    SYMBOL(cuCtxSetCurrent, 4000),
    SYMBOL(cuCtxPushCurrent, 4000),
    SYMBOL(cuCtxPopCurrent, 4000),
    SYMBOL(cuCtxGetDevice, 2000),
    SYMBOL(cuCtxGetStreamPriorityRange, 5050),
    SYMBOL(cuCtxSynchronize, 2000),
    SYMBOL(cuStreamCreate, 2000),
    SYMBOL(cuStreamCreateWithPriority, 5050),
    SYMBOL(cuStreamDestroy, 4000),
    SYMBOL(cuStreamGetCtx, 9020),
    SYMBOL(cuStreamGetPriority, 5050),
    SYMBOL(cuStreamGetFlags, 5050),
    SYMBOL(cuStreamQuery, 2000),
    SYMBOL(cuStreamSynchronize, 2000),
    SYMBOL(cuStreamWaitEvent, 3020),
    SYMBOL(cuLaunchHostFunc, 10000),
    SYMBOL(cuEventCreate, 2000),
    SYMBOL(cuEventDestroy, 4000),
    SYMBOL(cuEventRecord, 2000),
    SYMBOL(cuEventQuery, 2000),
    SYMBOL(cuEventSynchronize, 2000),
    SYMBOL(cuEventElapsedTime, 2000),
    SYMBOL_AS(cuEventElapsedTime, 12080, cuEventElapsedTime_v2),
    SYMBOL(cuMemAlloc, 3020),
    SYMBOL(cuMemFree, 3020),
    SYMBOL(cuMemAllocAsync, 11020),
    SYMBOL(cuMemFreeAsync, 11020),
    SYMBOL(cuMemHostAlloc, 2020),
    SYMBOL(cuMemFreeHost, 2000),
    SYMBOL(cuMemHostGetDevicePointer, 3020),
    SYMBOL(cuMemGetInfo, 3020),
    SYMBOL(cuMemcpyHtoD, 3020),
    SYMBOL(cuMemcpyDtoH, 3020),
    SYMBOL(cuMemcpyHtoDAsync, 3020),
    SYMBOL(cuMemcpyDtoHAsync, 3020),
    SYMBOL(cuMemcpyDtoDAsync, 3020),
    SYMBOL(cuMemsetD8Async, 3020),
    SYMBOL(cuMemsetD32Async, 3020),
    SYMBOL(cuPointerGetAttribute, 4000),
    SYMBOL(cuModuleLoadData, 2000),
    SYMBOL(cuModuleLoadDataEx, 2010),
    SYMBOL(cuModuleLoadFatBinary, 2000),
    SYMBOL(cuModuleUnload, 2000),
    SYMBOL(cuModuleGetFunction, 2000),
    SYMBOL(cuFuncGetAttribute, 2020),
    SYMBOL(cuFuncSetAttribute, 9000),
    SYMBOL(cuFuncGetParamInfo, 12040),
    SYMBOL(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050),
    SYMBOL(cuLaunchKernel, 4000),
    SYMBOL(cuLaunchKernelEx, 11060),
    SYMBOL(cuStreamBeginCapture, 10010),
    SYMBOL(cuStreamEndCapture, 10000),
    SYMBOL(cuStreamIsCapturing, 10000),
    SYMBOL(cuStreamGetCaptureInfo, 10010),
    SYMBOL_AS(cuStreamGetCaptureInfo, 11030, cuStreamGetCaptureInfo_v2),
    SYMBOL_AS(cuStreamGetCaptureInfo, 12030, cuStreamGetCaptureInfo_v3),
    SYMBOL(cuThreadExchangeStreamCaptureMode, 10010),
    SYMBOL(cuGraphInstantiateWithFlags, 11040),
    SYMBOL(cuGraphInstantiateWithParams, 12000),
    SYMBOL(cuGraphLaunch, 10000),
    SYMBOL(cuGraphDestroy, 10000),
    SYMBOL(cuGraphExecDestroy, 10000),
    SYMBOL(cuGraphGetNodes, 10000),
    SYMBOL(cuGetProcAddress, 11030),
    SYMBOL_AS(cuGetProcAddress, 12000, cuGetProcAddress_v2),
};

// The newest ABI that both the caller and the driver know.
const Symbol *find_symbol(const char *name, int version, bool &known)
{
    const State &s = state();
    const Symbol *best = nullptr;
    for (const Symbol &symbol : symbols) {
        if (std::strcmp(symbol.name, name) != 0 || symbol.since > s.machine.driver_version ||
            s.machine.hidden.count(name))
            continue;
        known = true;
        if (symbol.since <= version && (best == nullptr || symbol.since > best->since))
            best = &symbol;
    }
    return best;
}

CUresult resolve(const char *name, void **address, int version, cuuint64_t flags,
                 CUdriverProcAddressQueryResult *status)
{
    if (flags > CU_GET_PROC_ADDRESS_LEGACY_STREAM)
        report("UNSIMULATED", "cuGetProcAddress with the per-thread default stream");
    bool known = false;
    const Symbol *symbol = find_symbol(name, version, known);
    *address = symbol ? symbol->address : nullptr;
    if (status)
        *status = symbol  ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return symbol ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

struct ErrorText {
    CUresult code;
    const char *name, *text;
};

#define ERROR(code, text) {code, #code, text}

const ErrorText errors[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "PTX JIT compiler library not found"),
    ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

const ErrorText *find_error(CUresult code)
{
    for (const ErrorText &error : errors)
        if (error.code == code)
            return &error;
    return nullptr;
}

CUresult error_text(CUresult code, const char *ErrorText::*field, const char **out)
{
    const ErrorText *error = find_error(code);
    *out = error ? error->*field : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

} // namespace

extern "C" {

CUresult CUDAAPI cuGetErrorName(CUresult code, const char **text)
{
    SIM_CALL(cuGetErrorName, kNothing);
    return error_text(code, &ErrorText::name, text);
}

CUresult CUDAAPI cuGetErrorString(CUresult code, const char **text)
{
    SIM_CALL(cuGetErrorString, kNothing);
    return error_text(code, &ErrorText::text, text);
}

CUresult CUDAAPI cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags)
{
    SIM_CALL(cuGetProcAddress, kNothing);
    return resolve(name, address, version, flags, nullptr);
}

CUresult CUDAAPI cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags,
                                     CUdriverProcAddressQueryResult *status)
{
    SIM_CALL(cuGetProcAddress, kNothing);
    resolve(name, address, version, flags, status);
    return CUDA_SUCCESS; // from CUDA 12 on a missing symbol is told by *address and *status alone
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **dependencies, size_t *count)
{
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to)
{
    return cuEventElapsedTime_v2(milliseconds, from, to);
}

} // extern "C"
