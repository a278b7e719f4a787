/* The kernels as the build embedded them.  The definitions are generated at build time (setup.py):
 * a fat binary when nvcc was found, and always the source, for NVRTC at run time. */
#ifndef DDP_MP_CUDA_IMAGE_H
#define DDP_MP_CUDA_IMAGE_H

#include <stddef.h>

extern const unsigned char mp_cuda_image[];  /* fat binary; one zero byte when there is none */
extern const size_t mp_cuda_image_size;      /* 0: no nvcc at build time */
extern const char mp_cuda_image_note[];      /* nvcc version and targets, or why there is no image */
extern const char mp_cuda_source[];          /* csrc/cuda/cast.cu, NUL-terminated */

#endif
