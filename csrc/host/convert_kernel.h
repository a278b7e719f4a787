/* What host/convert.c and the files of kernels share.  Nothing else includes this. */
#ifndef DDP_MP_CAST_KERNEL_H
#define DDP_MP_CAST_KERNEL_H

#include <stdint.h>
#include <string.h>

#include "host/isa.h"

/* One table per file; those of another architecture do not exist, see the registry in host/convert.c. */
extern const mp_cast_isa mp_cast_scalar;
extern const mp_cast_isa mp_cast_avx2;
extern const mp_cast_isa mp_cast_avx512;
extern const mp_cast_isa mp_cast_neon;

/* What NaN becomes in bfloat16.  PyTorch has a vector path from float32 and float64 that gives all ones, and a
 * scalar one from float16 that gives the canonical NaN; both lose sign and payload. */
#define MP_BF16_NAN 0xffffu
#define MP_BF16_NAN_FROM_F16 0x7fc0u

/* A division, as the cheapest operation that rounds the same way. */
typedef struct mp_scale {
    float factor;
    int divide; /* non-zero: divide by factor; zero: multiply by it */
} mp_scale;

static inline mp_scale
mp_scale_of(double divisor)
{
    return mp_divisor_is_exact(divisor) ? (mp_scale){(float)(1.0 / divisor), 0} : (mp_scale){(float)divisor, 1};
}

#endif
