// Modules, functions and launches.
#include <algorithm>

#include "capture.hpp"
#include "entry.hpp"
#include "launch.hpp"
#include "module.hpp"
#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

namespace {

Function *find_function(CUfunction handle)
{
    for (const auto &[key, module] : state().modules)
        for (const auto &[name, function] : module->functions)
            if (reinterpret_cast<CUfunction>(function.get()) == handle)
                return function.get();
    report("MISUSE", "an unknown kernel handle");
    return nullptr;
}

CUresult load(CUmodule *out, const void *image)
{
    std::unique_ptr<Module> module;
    if (out == nullptr || image == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult refused = load_module(current_context(), image, module))
        return refused;
    *out = reinterpret_cast<CUmodule>(adopt(state().modules, std::move(module)));
    return CUDA_SUCCESS;
}

CUresult launch_on(CUfunction handle, const LaunchShape &shape, CUstream stream_handle, void **parameters, void **extra,
                   Lock &lock)
{
    Function *function = find_function(handle);
    Stream *stream = find_stream(stream_handle);
    if (stream == nullptr)
        report("MISUSE", "launch on a dead or unknown stream");
    if (function == nullptr || stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    return launch(*function, shape, *stream, parameters, extra, lock);
}

} // namespace

extern "C" {

CUresult CUDAAPI cuModuleLoadData(CUmodule *out, const void *image)
{
    SIM_UNSAFE_CALL(cuModuleLoadData, kUsual);
    return load(out, image);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned, CUjit_option *, void **)
{
    SIM_UNSAFE_CALL(cuModuleLoadDataEx, kUsual);
    return load(out, image);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *out, const void *image)
{
    SIM_UNSAFE_CALL(cuModuleLoadFatBinary, kUsual);
    return load(out, image);
}

CUresult CUDAAPI cuModuleUnload(CUmodule handle)
{
    SIM_UNSAFE_CALL(cuModuleUnload, kTeardown);
    Module *module = lookup(state().modules, handle);
    if (module == nullptr) {
        report("MISUSE", "cuModuleUnload of a dead or unknown module");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    module->dead = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name)
{
    SIM_CALL(cuModuleGetFunction, kUsual);
    const Module *module = lookup(state().modules, handle);
    if (module == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    const auto found = module->functions.find(name);
    if (found == module->functions.end())
        return CUDA_ERROR_NOT_FOUND;
    *out = reinterpret_cast<CUfunction>(found->second.get());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction handle)
{
    SIM_CALL(cuFuncGetAttribute, kUsual);
    const Function *function = find_function(handle);
    if (function == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = static_cast<int>(function->entry->max_threads); break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = static_cast<int>(function->entry->shared_bytes); break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = static_cast<int>(function->entry->local_bytes); break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->max_dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = function->module->context->device->capability; break;
    default: report("UNSIMULATED", "function attribute " + std::to_string(which)); return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction handle, CUfunction_attribute which, int value)
{
    SIM_CALL(cuFuncSetAttribute, kUsual);
    Function *function = find_function(handle);
    if (function == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        report("UNSIMULATED", "setting function attribute " + std::to_string(which));
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (value < 0 || value > 99 * 1024)
        return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size)
{
    SIM_CALL(cuFuncGetParamInfo, kUsual);
    const Function *function = find_function(handle);
    if (function == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (index >= function->entry->params.size())
        return CUDA_ERROR_INVALID_VALUE;
    *offset = function->entry->params[index].offset;
    if (size)
        *size = function->entry->params[index].size;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads, size_t)
{
    SIM_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, kUsual);
    const Function *function = find_function(handle);
    if (function == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (threads <= 0 || static_cast<unsigned>(threads) > function->entry->max_threads)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = std::max(1, 2048 / threads);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
                                void **parameters, void **extra)
{
    SIM_CALL(cuLaunchKernel, kUsual);
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared};
    return launch_on(function, shape, stream, parameters, extra, call.lock);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    SIM_CALL(cuLaunchKernelEx, kUsual);
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttributeID id = config->attrs[i].id;
        if (id != CU_LAUNCH_ATTRIBUTE_IGNORE && id != CU_LAUNCH_ATTRIBUTE_PRIORITY) {
            report("UNSIMULATED", "launch attribute " + std::to_string(id));
            return CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    const LaunchShape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                            {config->blockDimX, config->blockDimY, config->blockDimZ},
                            config->sharedMemBytes};
    return launch_on(function, shape, config->hStream, parameters, extra, call.lock);
}

} // extern "C"
