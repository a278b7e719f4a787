/* Element types that the engine converts between.  Shared by every layer; depends on nothing. */
#ifndef DDP_MP_DTYPE_H
#define DDP_MP_DTYPE_H

#include <stddef.h>

/* The order is part of the descriptor-table format that the kernels read: append only. */
typedef enum mp_dtype {
    MP_F64 = 0,
    MP_F32 = 1,
    MP_BF16 = 2,
    MP_F16 = 3,
    MP_NDTYPE = 4,
    MP_DTYPE_NONE = -1, /* not a type that is cast: integers, complex, float8, ... */
} mp_dtype;

/* Bytes of one element; 0 for MP_DTYPE_NONE. */
static inline size_t
mp_dtype_size(mp_dtype dtype)
{
    switch (dtype) {
    case MP_F64:
        return 8;
    case MP_F32:
        return 4;
    case MP_BF16:
    case MP_F16:
        return 2;
    default:
        return 0;
    }
}

/* PyTorch's name of the type without the "torch." prefix; "none" for MP_DTYPE_NONE. */
static inline const char *
mp_dtype_name(mp_dtype dtype)
{
    static const char *const names[MP_NDTYPE] = {"float64", "float32", "bfloat16", "float16"};
    return dtype >= 0 && dtype < MP_NDTYPE ? names[dtype] : "none";
}

#endif
