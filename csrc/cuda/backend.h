/* What the CUDA backend offers beside the vtable: its state in words, and the guard of the tests. */
#ifndef DDP_MP_BACKEND_CUDA_H
#define DDP_MP_BACKEND_CUDA_H

#include <stddef.h>

#include "cuda/driver.h" /* mp_cuda_is_simulated */

/* One line for build_info: what is open and which kernel image it runs, or why CUDA is off.  Makes no driver call and
 * opens nothing: before the first open it says so.  Always NUL-terminated. */
void mp_cuda_status(char *text, size_t size);

#endif
