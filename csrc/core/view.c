/* How the facts of tensors compare and read.  See view.h. */
#include "core/view.h"

#include <stdio.h>

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

const char *
mp_view_type(const mp_view *view, char text[static MP_TYPE_TEXT])
{
    static const char *const kinds[] = {
        [DL_INT] = "int", [DL_UINT] = "uint", [DL_FLOAT] = "float", [DL_BFLOAT] = "bfloat", [DL_COMPLEX] = "complex",
    };
    const dl_dtype *type = &view->type;
    const char *kind = type->code < sizeof kinds / sizeof kinds[0] ? kinds[type->code] : NULL;
    if (type->lanes == 1 && kind != NULL) {
        snprintf(text, MP_TYPE_TEXT, "%s%d", kind, type->bits);
    }
    else if (type->lanes == 1 && type->code == DL_BOOL) {
        snprintf(text, MP_TYPE_TEXT, "bool");
    }
    else {
        snprintf(text, MP_TYPE_TEXT, "DLPack type %d of %d bits, %d lanes", type->code, type->bits, type->lanes);
    }
    return text;
}
