/* How the facts of tensors compare.  See view.h. */
#include "view.h"

int
mp_view_same_shape(const mp_view *a, const mp_view *b)
{
    if (a->ndim != b->ndim) {
        return 0;
    }
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i]) {
            return 0;
        }
    }
    return 1;
}

int
mp_view_same_layout(const mp_view *a, const mp_view *b)
{
    if (!mp_view_same_shape(a, b)) {
        return 0;
    }
    if (a->numel == 0) {
        return 1;
    }
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] > 1 && a->strides[i] != b->strides[i]) {
            return 0;
        }
    }
    return 1;
}

uint64_t
mp_view_layout_key(const mp_view *view)
{
    uint64_t key = (uint64_t)view->ndim;
    for (int i = 0; i < view->ndim; i++) {
        int64_t stride = view->numel > 0 && view->shape[i] > 1 ? view->strides[i] : 0;
        key = (key ^ (uint64_t)view->shape[i]) * UINT64_C(0x9e3779b97f4a7c15);
        key = (key ^ (key >> 32) ^ (uint64_t)stride) * UINT64_C(0xd6e8feb86659fd93);
        key ^= key >> 32;
    }
    return key;
}
