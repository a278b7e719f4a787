/* Conversion kernels for the host.  No Python, no threads, no allocation: plain loops over memory.
 *
 * Rounding is to nearest, ties to even.  NaN stays NaN (float32 -> bfloat16 gives 0xffff, as a contiguous
 * Tensor.to does on AVX2 and AVX-512), infinities and subnormals are kept, overflow gives infinity.
 * Pointers need no alignment beyond the element's own bytes.
 */
#ifndef DDP_MP_CAST_H
#define DDP_MP_CAST_H

#include "host/isa.h"

/* The fastest usable instruction set, or the one called `name` (NULL: fastest).  Returns NULL when `name` is
 * unknown or cannot run here.  The result is static and immutable. */
const mp_cast_isa *mp_cast_select(const char *name);

/* All instruction sets compiled in, fastest first, ended by NULL. */
const mp_cast_isa *const *mp_cast_all(void);

/* Runs elements [begin, end) of a row on the calling thread.  `stream` asks for non-temporal stores. */
void mp_row_run(const mp_cast_isa *isa, const mp_row *row, int64_t begin, int64_t end, double divisor, int stream);

/* The formula of row.h for any three types, without a kernel of their own.  Tests hold the kernels against it. */
void mp_fuse_generic(const mp_cast_isa *isa, const mp_row *row, double divisor);

#endif
