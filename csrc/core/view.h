/* The raw facts of a tensor, and how they compare.  No Python, no memory touched. */
#ifndef DDP_MP_VIEW_H
#define DDP_MP_VIEW_H

#include <stdint.h>

#include "core/dlpack_abi.h"
#include "core/dtype.h"

typedef enum mp_layout {
    MP_LAYOUT_DENSE = 0, /* every byte of [data, data + numel * size) belongs to exactly one element */
    MP_LAYOUT_OTHER = 1, /* gapped, overlapping or expanded: copy through PyTorch */
} mp_layout;

#define MP_MAX_NDIM 32

typedef struct mp_view {
    void *data;      /* address of the first element, byte offset included; NULL only when numel is 0 */
    int64_t numel;
    mp_dtype dtype;  /* MP_DTYPE_NONE: a type that the engine does not cast */
    dl_dtype type;   /* as it was described, whatever it is */
    mp_layout layout;
    int device_type; /* DLDeviceType: 1 host, 2 CUDA */
    int device_index;
    int ndim;
    int64_t shape[MP_MAX_NDIM];
    int64_t strides[MP_MAX_NDIM]; /* elements; of dimensions of size 1 normalised to what a dense layout has */
} mp_view;

/* Same shape and, where it matters (more than one element in a dimension), same strides. */
int mp_view_same_shape(const mp_view *a, const mp_view *b);
int mp_view_same_layout(const mp_view *a, const mp_view *b);

/* The element type in words, for messages: PyTorch's name of it, or DLPack's numbers.  Returns `text`. */
#define MP_TYPE_TEXT 48
const char *mp_view_type(const mp_view *view, char text[static MP_TYPE_TEXT]);

/* A number that differs when shape or strides do (where they matter, as above), but for one chance in 2^64. */
uint64_t mp_view_layout_key(const mp_view *view);

static inline int
mp_view_same_device(const mp_view *view, int device_type, int device_index)
{
    return view->device_type == device_type && view->device_index == device_index;
}

#endif
