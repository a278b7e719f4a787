/* Compiling the kernels at run time, with the NVRTC library where there is one. */
#ifndef DDP_MP_CUDA_NVRTC_H
#define DDP_MP_CUDA_NVRTC_H

#include <stddef.h>

/* Machine code for sm_<capability>, or PTX for the newest older architecture that this NVRTC knows.  Returns memory to
 * be freed, with a note of which compiler made what; or NULL, with the reason.  Needs no device and no driver. */
void *mp_nvrtc_compile(const char *source, int capability, char *note, size_t note_size);

#endif
