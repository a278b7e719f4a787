/* The CUDA driver's entry points, found at run time: a symbol table and its loader, nothing else.
 *
 * The extension never links to CUDA and needs none of its headers, so the part of the driver's ABI that we use is
 * declared here.  One process-wide table, filled once, immutable after.  Loading makes no driver call except
 * cuGetProcAddress, which initialises nothing: cuInit belongs to the first open of a device.
 */
#ifndef DDP_MP_CUDA_DRIVER_H
#define DDP_MP_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef uint64_t cu_deviceptr;
typedef struct cu_context_s *cu_context;
typedef struct cu_stream_s *cu_stream;
typedef struct cu_event_s *cu_event;
typedef struct cu_module_s *cu_module;
typedef struct cu_function_s *cu_function;

/* Values of the driver's enumerations that we pass or test. */
enum {
    CU_OK = 0,
    CU_NOT_INITIALIZED = 3,
    CU_STUB_LIBRARY = 34,
    CU_NO_DEVICE = 100,
    CU_NOT_READY = 600,

    CU_EVENT_NO_TIMING = 2,
    CU_STREAM_IS_NON_BLOCKING = 1,

    CU_ATTRIBUTE_SM_COUNT = 16,
    CU_ATTRIBUTE_CC_MAJOR = 75,
    CU_ATTRIBUTE_CC_MINOR = 76,
};

/* Every entry point: its name, the CUDA version whose ABI we declare (what cuGetProcAddress is asked for), the exported
 * name of that ABI (for drivers older than cuGetProcAddress), and the parameters. */
#define MP_CUDA_SYMBOLS(X)                                                                                            \
    X(cuInit, 2000, "cuInit", (unsigned flags))                                                                       \
    X(cuDriverGetVersion, 2020, "cuDriverGetVersion", (int *version))                                                 \
    X(cuGetErrorName, 6000, "cuGetErrorName", (cu_result code, const char **text))                                    \
    X(cuGetErrorString, 6000, "cuGetErrorString", (cu_result code, const char **text))                                \
    X(cuDeviceGetCount, 2000, "cuDeviceGetCount", (int *count))                                                       \
    X(cuDeviceGet, 2000, "cuDeviceGet", (cu_device *device, int index))                                               \
    X(cuDeviceGetAttribute, 2000, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device))              \
    X(cuDevicePrimaryCtxRetain, 7000, "cuDevicePrimaryCtxRetain", (cu_context *context, cu_device device))            \
    X(cuDevicePrimaryCtxRelease, 11000, "cuDevicePrimaryCtxRelease_v2", (cu_device device))                           \
    X(cuCtxPushCurrent, 4000, "cuCtxPushCurrent_v2", (cu_context context))                                            \
    X(cuCtxPopCurrent, 4000, "cuCtxPopCurrent_v2", (cu_context *context))                                             \
    X(cuStreamCreateWithPriority, 5050, "cuStreamCreateWithPriority",                                                 \
      (cu_stream *stream, unsigned flags, int priority))                                                              \
    X(cuStreamDestroy, 4000, "cuStreamDestroy_v2", (cu_stream stream))                                                \
    X(cuStreamSynchronize, 2000, "cuStreamSynchronize", (cu_stream stream))                                           \
    X(cuStreamWaitEvent, 3020, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned flags))               \
    X(cuEventCreate, 2000, "cuEventCreate", (cu_event *event, unsigned flags))                                        \
    X(cuEventDestroy, 4000, "cuEventDestroy_v2", (cu_event event))                                                    \
    X(cuEventRecord, 2000, "cuEventRecord", (cu_event event, cu_stream stream))                                       \
    X(cuEventQuery, 2000, "cuEventQuery", (cu_event event))                                                           \
    X(cuEventSynchronize, 2000, "cuEventSynchronize", (cu_event event))                                               \
    X(cuModuleLoadData, 2000, "cuModuleLoadData", (cu_module *module, const void *image))                             \
    X(cuModuleUnload, 2000, "cuModuleUnload", (cu_module module))                                                     \
    X(cuModuleGetFunction, 2000, "cuModuleGetFunction",                                                               \
      (cu_function *function, cu_module module, const char *name))                                                    \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, "cuOccupancyMaxActiveBlocksPerMultiprocessor",               \
      (int *blocks, cu_function function, int block_size, size_t dynamic_shared))                                     \
    X(cuLaunchKernel, 4000, "cuLaunchKernel",                                                                         \
      (cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
       unsigned block_z, unsigned shared, cu_stream stream, void **parameters, void **extra))

typedef struct mp_cuda_api {
#define MP_CUDA_FIELD(name, version, exported, parameters) cu_result(*name) parameters;
    MP_CUDA_SYMBOLS(MP_CUDA_FIELD)
#undef MP_CUDA_FIELD
} mp_cuda_api;

/* The table, or NULL when there is no usable driver; then *why says why.  Both live as long as the process. */
const mp_cuda_api *mp_cuda_load(const char **why);

/* 1 when the driver library in this process is the simulated one of the tests: it exports sim_reset, which a real
 * driver never does.  Loads nothing. */
int mp_cuda_is_simulated(void);

/* The simulated driver's notion of PyTorch's current stream, or NULL when the driver is a real one. */
void *(*mp_cuda_simulated_stream(void))(void);

#endif
