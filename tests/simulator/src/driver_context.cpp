// Initialisation, devices and contexts.
#include <algorithm>
#include <cstdio>
#include <unistd.h>

#include "capture.hpp"
#include "entry.hpp"
#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

// Numbers of a plausible device.  Few multiprocessors, so that a persistent grid stays cheap to interpret.
static bool attribute(const Device &device, CUdevice_attribute which, int &value)
{
    const int cc = device.capability;
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: value = cc / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: value = cc % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: value = 4; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        value = cc == 75 ? 1024 : cc == 80 || cc / 10 == 9 || cc / 10 == 10 ? 2048 : 1536;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: value = cc == 75 ? 16 : 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: value = 48 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: value = cc == 75 ? 64 * 1024 : 99 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: value = cc == 75 ? 64 * 1024 : 100 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: value = 4 * 1024 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: value = 1; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: value = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: value = 1 + device.ordinal; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: value = 0; break;
    default: return false;
    }
    return true;
}

static Context *context_of(CUcontext handle)
{
    for (const auto &device : state().machine.devices)
        if (reinterpret_cast<CUcontext>(&device->primary) == handle)
            return &device->primary;
    return nullptr;
}

static CUcontext handle_of(Context *context) { return reinterpret_cast<CUcontext>(context); }

extern "C" {

CUresult CUDAAPI cuInit(unsigned flags)
{
    SIM_CALL(cuInit, kNothing);
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    State &s = state();
    if (s.machine.devices.empty())
        return CUDA_ERROR_NO_DEVICE;
    s.initialised = true;
    s.process = getpid();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version)
{
    SIM_CALL(cuDriverGetVersion, kNothing);
    *version = state().machine.driver_version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    SIM_CALL(cuDeviceGetCount, kInit);
    *count = static_cast<int>(state().machine.devices.size());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
    SIM_CALL(cuDeviceGet, kInit);
    if (!device_at(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char *name, int size, CUdevice device)
{
    SIM_CALL(cuDeviceGetName, kInit);
    if (!device_at(device))
        return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<size_t>(size), "Simulated device sm_%d (no GPU)", device_at(device)->capability);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{
    SIM_CALL(cuDeviceGetAttribute, kInit);
    if (!device_at(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (attribute(*device_at(device), which, *value))
        return CUDA_SUCCESS;
    report("UNSIMULATED", "device attribute " + std::to_string(which));
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    SIM_CALL(cuDeviceTotalMem, kInit);
    if (!device_at(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = state().memory.limit;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    SIM_CALL(cuDevicePrimaryCtxRetain, kInit);
    if (!device_at(device))
        return CUDA_ERROR_INVALID_DEVICE;
    Context &primary = device_at(device)->primary;
    if (primary.references++ == 0) {
        primary.sticky = CUDA_SUCCESS;
        primary.legacy = make_stream(&primary, 0, 0, "the default stream");
        primary.legacy->legacy = true;
    }
    *context = handle_of(&primary);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device)
{
    SIM_CALL(cuDevicePrimaryCtxRelease, kInit);
    Device *const d = device_at(device);
    if (!d)
        return CUDA_ERROR_INVALID_DEVICE;
    if (d->primary.references == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (d->primary.references == 1)
        drain(call.lock); // destroying a context waits for its work
    d->primary.references--;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    SIM_CALL(cuDevicePrimaryCtxGetState, kInit);
    if (!device_at(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = device_at(device)->primary.references > 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context)
{
    SIM_CALL(cuCtxGetCurrent, kInit);
    *context = handle_of(current_context());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context)
{
    SIM_CALL(cuCtxSetCurrent, kInit);
    if (context && !context_of(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    auto &stack = context_stack();
    if (!stack.empty())
        stack.pop_back();
    if (context)
        stack.push_back(context_of(context));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context)
{
    SIM_CALL(cuCtxPushCurrent, kInit);
    if (!context_of(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    context_stack().push_back(context_of(context));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context)
{
    SIM_CALL(cuCtxPopCurrent, kTeardown);
    auto &stack = context_stack();
    if (stack.empty())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = handle_of(stack.back());
    stack.pop_back();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
    SIM_CALL(cuCtxGetDevice, kInit | kContext);
    *device = current_context()->device->ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    SIM_CALL(cuCtxGetStreamPriorityRange, kUsual);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize()
{
    SIM_UNSAFE_CALL(cuCtxSynchronize, kUsual);
    note_blocking();
    const Context *context = current_context();
    for (const auto &[handle, stream] : state().streams) {
        if (stream->context != context)
            continue;
        host_waits_for(stream->tail, call.lock);
    }
    return context->sticky;
}

} // extern "C"
