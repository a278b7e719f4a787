/* The kernels of one instruction set, as a table. */
#ifndef DDP_MP_CAST_ISA_H
#define DDP_MP_CAST_ISA_H

#include <stddef.h>

#include "core/row.h"

/* Converts n elements.  src and dst do not overlap unless they are equal and the types have equal size. */
typedef void (*mp_cast_fn)(const void *src, void *dst, size_t n);

/* dst[i] = to_dst((wide(src[i]) + wide(add[i])) / divisor), see row.h.  src or add may be NULL, not both. */
typedef void (*mp_fuse_fn)(const void *src, const void *add, void *dst, size_t n, double divisor);

/* The kernels of one instruction set.  Entries that an instruction set does not speed up point at scalar ones. */
typedef struct mp_cast_isa {
    const char *name; /* "scalar", "avx2", "avx512", "neon" */
    int (*usable)(void); /* non-zero when this processor can run it */
    mp_cast_fn cast[MP_NDTYPE][MP_NDTYPE];   /* [src][dst]; equal types copy */
    mp_cast_fn stream[MP_NDTYPE][MP_NDTYPE]; /* the same with non-temporal stores; NULL: use cast */
    /* [src][dst] with add of type src or NULL; and [src][dst] with add of type float32.  Pairs outside these
     * go through mp_fuse_generic. */
    mp_fuse_fn fuse_same[MP_NDTYPE][MP_NDTYPE];
    mp_fuse_fn fuse_f32[MP_NDTYPE][MP_NDTYPE];
} mp_cast_isa;

#endif
