/* The kernel on a device: from the image that the build embedded, else compiled at run time. */
#ifndef DDP_MP_CUDA_MODULE_H
#define DDP_MP_CUDA_MODULE_H

#include "core/backend.h"
#include "cuda/driver.h"

/* Loads the kernels into the current context.  `capability` is 90 for 9.0.  *note tells which image it was.  On failure
 * nothing stays loaded. */
mp_status mp_cuda_module_load(const mp_cuda_api *api, int index, int capability, cu_module *module,
                              cu_function *kernel, char *note, size_t note_size, mp_error *err);

#endif
