/* What the files of the CUDA backend share: the device, and how a driver call is made and checked. */
#ifndef DDP_MP_CUDA_DEVICE_H
#define DDP_MP_CUDA_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/backend.h"
#include "cuda/driver.h"

struct mp_event {
    mp_device *device;
    cu_event handle;
    atomic_int recorded; /* since it was taken from the pool */
    mp_event *next;      /* in the pool */
};

struct mp_device {
    int index;
    const mp_cuda_api *api;
    cu_context context; /* the primary one, which PyTorch uses too; retained for the life of the process */
    cu_stream stream;   /* private; never destroyed, since PyTorch's allocator may name it to the end */
    cu_module module;
    cu_function kernel;
    unsigned grid;         /* blocks of a persistent launch on a caller's stream */
    unsigned private_grid; /* ... and on the private stream */
    char note[96];         /* which image the kernel is from */

    pthread_mutex_t lock; /* guards the pool; no driver call is made under it */
    mp_event *events;     /* the pool */

    _Atomic uint64_t launches, records, waits, bytes_read, bytes_written;
};

/* Initialises the driver, once a process.  `index` is the device that an error names. */
mp_status mp_cuda_initialise(const mp_cuda_api *api, int index, mp_error *err);

/* Version of the driver's API as the driver gives it (13000 is 13.0); 0 before the first successful open. */
int mp_cuda_driver_version(void);

/* MP_OK unless this process was forked from one that had initialised CUDA.  Makes no driver call. */
mp_status mp_cuda_check_fork(mp_error *err);

/* Makes the device's context current on this thread.  A success is paired with one mp_cuda_leave.  Fails in a process
 * that was forked after CUDA was initialised. */
mp_status mp_cuda_enter(mp_device *device, mp_error *err);

/* Restores the context that was current.  Returns `status` unless that was a success and this fails. */
mp_status mp_cuda_leave(mp_device *device, mp_status status, mp_error *err);

/* Writes "cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal ..., device 0". */
mp_status mp_cuda_fail(const mp_cuda_api *api, const char *call, cu_result code, int index, mp_error *err);

static inline mp_status
mp_cuda_check(const mp_cuda_api *api, const char *call, cu_result code, int index, mp_error *err)
{
    return code == CU_OK ? MP_OK : mp_cuda_fail(api, call, code, index, err);
}

/* MP_CUDA(device, err, cuEventRecord, event, stream): calls, checks, and is an mp_status. */
#define MP_CUDA(device, err, call, ...)                                                                               \
    mp_cuda_check((device)->api, #call, (device)->api->call(__VA_ARGS__), (device)->index, err)

#endif
