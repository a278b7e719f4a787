/* DLTensor -> mp_view.  See core/dlpack.h.  What is read comes from other libraries: no number in it is trusted. */
#include "core/dlpack.h"

static mp_dtype
dtype_of(dl_dtype dtype)
{
    if (dtype.lanes != 1) {
        return MP_DTYPE_NONE;
    }
    if (dtype.code == DL_BFLOAT) {
        return dtype.bits == 16 ? MP_BF16 : MP_DTYPE_NONE;
    }
    if (dtype.code != DL_FLOAT) {
        return MP_DTYPE_NONE;
    }
    switch (dtype.bits) {
    case 64:
        return MP_F64;
    case 32:
        return MP_F32;
    case 16:
        return MP_F16;
    default:
        return MP_DTYPE_NONE;
    }
}

/* Elements of the shape.  NULL, or the reason to refuse. */
static const char *
count_elements(const dl_tensor *tensor, int64_t *numel)
{
    int64_t product = 1, bytes;
    int empty = 0, overflow = 0;
    if (tensor->ndim < 0 || tensor->ndim > MP_MAX_NDIM) {
        return "it has more dimensions than are supported (32)";
    }
    if (tensor->ndim > 0 && tensor->shape == NULL) {
        return "its description has no shape";
    }
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) {
            return "its description has a negative size";
        }
        empty |= tensor->shape[i] == 0;
        overflow |= __builtin_mul_overflow(product, tensor->shape[i], &product);
    }
    *numel = empty ? 0 : product;
    int64_t element = ((int64_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
    if (!empty && (overflow || __builtin_mul_overflow(product, element, &bytes))) {
        return "its size does not fit 63 bits";
    }
    return NULL;
}

/* The facts of the hot path.  NULL, or the reason to refuse. */
static const char *
read_facts(const dl_tensor *tensor, mp_view *out)
{
    const char *reason = count_elements(tensor, &out->numel);
    if (reason != NULL) {
        return reason;
    }
    uintptr_t address = (uintptr_t)tensor->data;
    /* An empty tensor may have no memory; then its offset leads nowhere either. */
    if (address == 0 && out->numel > 0) {
        return "it has no memory: its storage was released, or it is a wrapper or a fake tensor";
    }
    if (address != 0 && __builtin_add_overflow(address, tensor->byte_offset, &address)) {
        return "its byte offset does not fit the address space";
    }
    out->data = (void *)address;
    out->dtype = dtype_of(tensor->dtype);
    out->type = tensor->dtype;
    out->device_type = tensor->device.type;
    out->device_index = tensor->device.index;
    size_t size = mp_dtype_size(out->dtype);
    if (size != 0 && out->numel > 0 && address % size != 0) {
        return "its data is not aligned to its elements";
    }
    return NULL;
}

/* Dense in any order of dimensions: sorted by stride, each stride is what the dimensions below it span. */
static mp_layout
layout_of(const mp_view *view)
{
    int order[MP_MAX_NDIM];
    int count = 0;
    if (view->numel <= 1) {
        return MP_LAYOUT_DENSE;
    }
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 1) {
            continue; /* never stepped along, so that its stride says nothing */
        }
        int place = count++;
        for (; place > 0 && view->strides[order[place - 1]] > view->strides[i]; place--) {
            order[place] = order[place - 1];
        }
        order[place] = i;
    }
    int64_t span = 1; /* at most numel: no overflow */
    for (int i = 0; i < count; i++) {
        if (view->strides[order[i]] != span) {
            return MP_LAYOUT_OTHER;
        }
        span *= view->shape[order[i]];
    }
    return MP_LAYOUT_DENSE;
}

/* What a row-major tensor has at dimension i, given the stride of the next: the same for every exporter, whatever it
 * reports of dimensions of size 1. */
static int64_t
stride_before(const mp_view *view, int i)
{
    int64_t stride;
    if (i + 1 == view->ndim) {
        return 1;
    }
    int64_t size = view->shape[i + 1] > 0 ? view->shape[i + 1] : 1;
    return __builtin_mul_overflow(view->strides[i + 1], size, &stride) ? 1 : stride;
}

/* Shape, strides and layout; read_facts() has accepted the tensor. */
static void
read_layout(const dl_tensor *tensor, mp_view *out)
{
    out->ndim = tensor->ndim;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        out->shape[i] = tensor->shape[i];
        if (tensor->strides == NULL || tensor->shape[i] == 1) {
            out->strides[i] = stride_before(out, i);
        }
        else {
            out->strides[i] = tensor->strides[i];
        }
    }
    out->layout = layout_of(out);
}

const char *
mp_dlpack_read(const dl_tensor *tensor, int whole, mp_view *out)
{
    const char *reason = read_facts(tensor, out);
    if (reason == NULL && whole) {
        read_layout(tensor, out);
    }
    return reason;
}
