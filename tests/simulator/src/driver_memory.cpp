// Memory and copies.
#include <cstring>

#include "capture.hpp"
#include "entry.hpp"
#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

namespace {

CUresult allocate(Range::Kind kind, size_t bytes, Range *&range)
{
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    const int device = kind == Range::Pinned ? kAnyDevice : current_context()->device->ordinal;
    range = state().memory.allocate(kind, bytes, device);
    if (range == nullptr)
        return CUDA_ERROR_OUT_OF_MEMORY;
    state().history.forget(range->base, range->end());
    return CUDA_SUCCESS;
}

Range *find_live(uint64_t base, Range::Kind kind)
{
    Range *range = state().memory.live(base);
    return range && range->kind == kind ? range : nullptr;
}

void release(Range &range, const Actor &actor)
{
    touch_range(range, range.base, range.end(), AccessKind::Free, actor);
    state().memory.release(range);
}

// A free at the call, ordered with the host only: pending work that uses the memory is a race.
CUresult free_now(uint64_t base, Range::Kind kind, const char *api)
{
    if (base == 0)
        return CUDA_SUCCESS;
    Range *range = find_live(base, kind);
    if (range == nullptr) {
        report("MISUSE", std::string(api) + " of memory that is not live");
        return CUDA_ERROR_INVALID_VALUE;
    }
    check_watches();
    release(*range, host_actor(api));
    return CUDA_SUCCESS;
}

bool is_device_range(uint64_t base, size_t bytes)
{
    const Range *range = state().memory.find_or_add(base);
    if (range == nullptr || range->freed)
        return false;
    return range->kind == Range::Implicit || range->holds(base, bytes);
}

bool is_pinned(const void *base)
{
    const Range *range = state().memory.find(reinterpret_cast<uint64_t>(base));
    return range && range->kind == Range::Pinned;
}

void copy_bytes(void *to, const void *from, size_t bytes, const Actor &actor)
{
    touch(from, bytes, AccessKind::Read, actor);
    touch(to, bytes, AccessKind::Write, actor);
    std::memcpy(to, from, bytes);
}

// Pinned memory is read when the copy runs; the host must not touch it before.  Pageable memory is staged at the call.
Work copy_to_device(uint64_t to, const void *from, size_t bytes)
{
    auto *target = reinterpret_cast<void *>(to);
    if (is_pinned(from))
        return {"copy from pinned memory", [=](Op &op) { watch(from, bytes, op); },
                [=](Op &op, Lock &) { copy_bytes(target, from, bytes, op.actor); }};
    return {"copy from pageable memory",
            [=](Op &op) {
                op.staged.assign(static_cast<const uint8_t *>(from), static_cast<const uint8_t *>(from) + bytes);
            },
            [=](Op &op, Lock &) {
                touch(target, bytes, AccessKind::Write, op.actor);
                std::memcpy(target, op.staged.data(), bytes);
            }};
}

Work copy_work(const char *label, void *to, const void *from, size_t bytes)
{
    return {label, nullptr, [=](Op &op, Lock &) { copy_bytes(to, from, bytes, op.actor); }};
}

CUresult upload(uint64_t to, const void *from, size_t bytes, Stream *stream, Lock &lock)
{
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (from == nullptr || !is_device_range(to, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    check_watches();
    if (!is_pinned(from))
        note_blocking(); // staging may have to wait for room
    return submit(*stream, copy_to_device(to, from, bytes), lock);
}

CUresult download(void *to, uint64_t from, size_t bytes, Stream *stream, Lock &lock)
{
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (to == nullptr || !is_device_range(from, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    const bool waits = !is_pinned(to) && !stream->capture;
    const CUresult result =
        submit(*stream, copy_work("copy to host memory", to, reinterpret_cast<const void *>(from), bytes), lock);
    if (result == CUDA_SUCCESS && waits) { // pageable memory: returns when the bytes are there
        note_blocking();
        host_waits_for(stream->tail, lock);
        return stream->context->sticky;
    }
    return result;
}

template <class T>
CUresult fill(uint64_t to, T value, size_t count, Stream *stream, Lock &lock)
{
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (to % sizeof(T) != 0 || (count && !is_device_range(to, count * sizeof(T))))
        return CUDA_ERROR_INVALID_VALUE;
    const auto run = [=](Op &op, Lock &) {
        touch(reinterpret_cast<void *>(to), count * sizeof(T), AccessKind::Write, op.actor);
        std::fill_n(reinterpret_cast<T *>(to), count, value);
    };
    return submit(*stream, {"memset", nullptr, run}, lock);
}

} // namespace

extern "C" {

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
    SIM_UNSAFE_CALL(cuMemAlloc, kUsual);
    Range *range = nullptr;
    const CUresult result = allocate(Range::Device, bytes, range);
    if (result == CUDA_SUCCESS)
        *out = range->base;
    return result;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr base)
{
    SIM_UNSAFE_CALL(cuMemFree, kTeardown | kContext);
    return free_now(base, Range::Device, "cuMemFree");
}

CUresult CUDAAPI cuMemHostAlloc(void **out, size_t bytes, unsigned)
{
    SIM_UNSAFE_CALL(cuMemHostAlloc, kUsual);
    Range *range = nullptr;
    const CUresult result = allocate(Range::Pinned, bytes, range);
    if (result == CUDA_SUCCESS)
        *out = reinterpret_cast<void *>(range->base);
    return result;
}

CUresult CUDAAPI cuMemFreeHost(void *base)
{
    SIM_UNSAFE_CALL(cuMemFreeHost, kTeardown | kContext);
    return free_now(reinterpret_cast<uint64_t>(base), Range::Pinned, "cuMemFreeHost");
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr *out, void *host, unsigned)
{
    SIM_CALL(cuMemHostGetDevicePointer, kUsual);
    if (!is_pinned(host))
        return CUDA_ERROR_INVALID_VALUE;
    *out = reinterpret_cast<CUdeviceptr>(host);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(size_t *unused, size_t *total)
{
    SIM_CALL(cuMemGetInfo, kUsual);
    *total = state().memory.limit;
    *unused = state().memory.limit - state().memory.used;
    return CUDA_SUCCESS;
}

// The address is there at once, the memory only where the stream is: the history begins with this operation's write.
CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream handle)
{
    SIM_CALL(cuMemAllocAsync, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        report("UNSIMULATED", "cuMemAllocAsync during capture");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    Range *range = nullptr;
    if (const CUresult result = allocate(Range::Device, bytes, range))
        return result;
    *out = range->base;
    const OpPtr op = enqueue(*stream, {"cuMemAllocAsync", nullptr, nullptr});
    touch_range(*range, range->base, range->end(), AccessKind::Write, op->actor);
    progress(call.lock);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr base, CUstream handle)
{
    SIM_CALL(cuMemFreeAsync, kTeardown | kContext);
    Stream *stream = find_stream(handle);
    Range *range = find_live(base, Range::Device);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (range == nullptr || range->free_queued) {
        report("MISUSE", "cuMemFreeAsync of memory that is not live");
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->capture) {
        report("UNSIMULATED", "cuMemFreeAsync during capture");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    range->free_queued = true;
    return submit(*stream, {"cuMemFreeAsync", nullptr, [range](Op &op, Lock &) { release(*range, op.actor); }},
                  call.lock);
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    SIM_CALL(cuMemcpyHtoDAsync, kUsual);
    return upload(to, from, bytes, find_stream(stream), call.lock);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    SIM_CALL(cuMemcpyDtoHAsync, kUsual);
    return download(to, from, bytes, find_stream(stream), call.lock);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle)
{
    SIM_CALL(cuMemcpyDtoDAsync, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (bytes && (!is_device_range(to, bytes) || !is_device_range(from, bytes)))
        return CUDA_ERROR_INVALID_VALUE;
    const auto *source = reinterpret_cast<const void *>(from);
    return submit(*stream, copy_work("copy on the device", reinterpret_cast<void *>(to), source, bytes), call.lock);
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes)
{
    SIM_UNSAFE_CALL(cuMemcpyHtoD, kUsual);
    note_blocking();
    Stream *stream = current_context()->legacy;
    const CUresult result = upload(to, from, bytes, stream, call.lock);
    host_waits_for(stream->tail, call.lock);
    return result ? result : stream->context->sticky;
}

CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes)
{
    SIM_UNSAFE_CALL(cuMemcpyDtoH, kUsual);
    note_blocking();
    Stream *stream = current_context()->legacy;
    const CUresult result = download(to, from, bytes, stream, call.lock);
    host_waits_for(stream->tail, call.lock);
    return result ? result : stream->context->sticky;
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
{
    SIM_CALL(cuMemsetD8Async, kUsual);
    return fill<uint8_t>(to, value, count, find_stream(stream), call.lock);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    SIM_CALL(cuMemsetD32Async, kUsual);
    return fill<uint32_t>(to, value, count, find_stream(stream), call.lock);
}

CUresult CUDAAPI cuPointerGetAttribute(void *out, CUpointer_attribute which, CUdeviceptr pointer)
{
    SIM_CALL(cuPointerGetAttribute, kInit);
    const Range *range = state().memory.find(pointer);
    if (range == nullptr || range->freed)
        return CUDA_ERROR_INVALID_VALUE;
    Device *device = device_at(range->device == kAnyDevice ? 0 : range->device);
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *static_cast<CUcontext *>(out) = reinterpret_cast<CUcontext>(&device->primary);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int *>(out) = device->ordinal; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<CUmemorytype *>(out) = range->kind == Range::Pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    default: report("UNSIMULATED", "pointer attribute " + std::to_string(which)); return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

} // extern "C"
