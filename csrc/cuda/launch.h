/* Launches of the CUDA backend: rows become arguments of the kernel, which need no memory on the device. */
#ifndef DDP_MP_CUDA_LAUNCH_H
#define DDP_MP_CUDA_LAUNCH_H

#include "cuda/device.h"

/* Rows of one launch.  The arguments of a kernel are at most 4,096 bytes where neither the toolkit nor the driver is of
 * CUDA 12.1 or later: 101 rows of 40 bytes and 24 bytes of numbers are 4,064.  A longer list takes several launches. */
#define MP_CUDA_ROWS 101
#define MP_CUDA_ARGUMENT_BYTES 4096

#define MP_CUDA_BLOCK_THREADS 256 /* what cuda/cast.cu is compiled for */

/* What a benchmark may define otherwise.  Nothing here has been measured on a GPU.  cuda/cast.cu has those of the kernel.
 *
 * Blocks on a multiprocessor of a launch on the private stream.  Four blocks take all registers of a multiprocessor, so
 * that nothing runs beside them; two leave half of them to what computes meanwhile, and load 32 KiB at a time. */
#ifndef MP_CUDA_PRIVATE_BLOCKS
#define MP_CUDA_PRIVATE_BLOCKS 2
#endif

/* Of the private stream.  0 is that of ordinary streams: a cast that goes first keeps the work beside it waiting. */
#ifndef MP_CUDA_STREAM_PRIORITY
#define MP_CUDA_STREAM_PRIORITY 0
#endif

/* A chunk is what one warp takes at a time, 2^shift elements: at least one full step of the kernel's loop, which is 1,024
 * elements of 16 bits, and no more than what gives every warp of the grid some. */
#ifndef MP_CUDA_SHIFT_MIN
#define MP_CUDA_SHIFT_MIN 10
#define MP_CUDA_SHIFT_MAX 13
#define MP_CUDA_CHUNKS_PER_WARP 2
#endif

/* Sets the grids of a device whose kernel is loaded.  The context is current.  `capability` is 90 for 9.0. */
mp_status mp_cuda_choose_grid(mp_device *device, cu_device handle, int capability, mp_error *err);

/* Entries of the backend; core/backend.h says what they do. */
mp_status mp_cuda_launch(mp_device *device, const mp_row *rows, size_t count, double divisor, mp_error *err);
mp_status mp_cuda_launch_on(mp_device *device, const mp_row *rows, size_t count, double divisor, void *caller_stream,
                            mp_error *err);

#endif
