/* Moving gradients of a bucket between `.grad` and flat memory: pack, give, accumulate.
 *
 * Flat.  Buckets are packed row after row without gaps, each row in the memory order of its master.  A tensor is read
 * flat when it is dense and has its master's strides; rows for which some tensor is not are left untouched and returned
 * by number: the caller does those with PyTorch's own operations.
 *
 * Order of every operation: look at everything, launch, and only then change `.grad`.  A failure before the first change
 * leaves all as it was; a failure after goes on with the other rows.
 *
 * Streams.  Launches go to the current stream.  Gradients are let go right after: memory that the allocator then uses
 * again on that stream is used in order.
 */
#include "python/gradients.h"

/* How many rows ahead objects are asked for. */
#define AHEAD 8

/* One operation on one bucket: what it collects until it launches. */
typedef struct operation {
    bucket_state *bucket;
    PyObject *skipped; /* owned list of rows for the caller */
    PyObject *any;     /* borrowed; a tensor of the device that lends its type for the current stream */
    size_t count;      /* rows of work */
    uint64_t bytes;
    int clears; /* gradients that were read from leaves become None */
} operation;

static int
begin(Gradients *self, operation *op, size_t bucket)
{
    *op = (operation){.bucket = &self->buckets[bucket]};
    if (mp_gradients_enter(self) < 0) {
        return -1;
    }
    op->skipped = PyList_New(0);
    if (op->skipped == NULL) {
        mp_gradients_leave(self);
        return -1;
    }
    return 0;
}

/* Drops the scratch; returns the list of skipped rows, or NULL when `failed`. */
static PyObject *
end(Gradients *self, operation *op, int failed)
{
    for (size_t k = 0; k < op->bucket->count; k++) {
        Py_CLEAR(self->moves[k].gradient);
        Py_CLEAR(self->moves[k].own);
        Py_CLEAR(self->moves[k].result);
    }
    mp_gradients_leave(self);
    if (failed) {
        Py_CLEAR(op->skipped);
    }
    return op->skipped;
}

static int
skip(Gradients *self, operation *op, size_t k)
{
    Py_CLEAR(self->moves[k].gradient);
    Py_CLEAR(self->moves[k].own);
    Py_CLEAR(self->moves[k].result);
    return mp_list_append_index(op->skipped, op->bucket->rows[k]);
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

/* The device of the bucket is that of the tensor, which may have moved.  0, or -1 with an exception. */
static int
use_device(Gradients *self, bucket_state *bucket, const mp_view *view)
{
    if (bucket->device == NULL || !mp_view_same_device(view, bucket->device_type, bucket->device_index)) {
        mp_error err;
        const mp_backend *backend = mp_backend_for(view->device_type);
        if (backend == NULL) {
            return -1;
        }
        mp_device *device;
        if (backend->open(view->device_index, &device, &err) != MP_OK) {
            mp_raise(self->state, &err);
            return -1;
        }
        bucket->backend = backend;
        bucket->device = device;
        bucket->device_type = view->device_type;
        bucket->device_index = view->device_index;
    }
    return 0;
}

/* Reads a flat buffer of the bucket: `out` of pack(), `reduced` of give(). */
static int
read_buffer(Gradients *self, operation *op, PyObject *tensor, const char *what, mp_view *view)
{
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, tensor, view, &why);
    if (result == MP_EXCHANGE_REFUSED) {
        PyErr_Format(PyExc_BufferError, "%s cannot be read: %s", what, why != NULL ? why : "no reason given");
    }
    if (result != MP_EXCHANGE_OK) {
        return -1;
    }
    if (view->ndim != 1 || view->layout != MP_LAYOUT_DENSE || view->numel != op->bucket->numel ||
        view->dtype == MP_DTYPE_NONE) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous floating-point tensor of 1 dimension and %lld elements, found %lld "
                     "elements in %d dimensions",
                     what, (long long)op->bucket->numel, (long long)view->numel, view->ndim);
        return -1;
    }
    op->any = tensor;
    return use_device(self, op->bucket, view);
}

/* Where the row's elements are in a flat buffer of its bucket. */
static char *
part_of(const grad_row *row, const mp_view *buffer)
{
    return (char *)buffer->data + row->offset * (int64_t)mp_dtype_size(buffer->dtype);
}

/* What a master's memory order is.  A master that is cast keeps the order of the plan: the forward has looked.  Others may
 * have got another one by now.  1, 0 when it has none that others can be compared with, -1 with an exception. */
static int
read_order(Gradients *self, size_t index, uint64_t *layout, mp_dtype *dtype)
{
    const char *why = NULL;
    mp_view view;
    const grad_row *row = &self->rows[index];
    *layout = row->layout;
    *dtype = row->dtype;
    if (row->cast) {
        return row->dtype != MP_DTYPE_NONE;
    }
    mp_exchange_result result = mp_exchange_layout(self->state->exchange, row->master, &view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, index, "reading its strides");
        return -1;
    }
    if (result == MP_EXCHANGE_OK && view.numel != row->numel) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': expected %lld elements, as planned, found %lld",
                     mp_gradients_name(self, index), (long long)row->numel, (long long)view.numel);
        return -1;
    }
    *layout = mp_view_layout_key(&view);
    *dtype = view.dtype;
    return result == MP_EXCHANGE_OK && view.layout == MP_LAYOUT_DENSE;
}

/* 1 when `tensor` can be read and written flat in this memory order, 0 when not, -1 with an exception.  `ours`: we made it,
 * so that it has no negative bit. */
static int
read_flat(Gradients *self, const operation *op, size_t index, PyObject *tensor, uint64_t layout, int ours, mp_view *view,
          const char *what)
{
    const char *why = NULL;
    mp_exchange_result result = ours ? mp_exchange_layout(self->state->exchange, tensor, view, &why)
                                     : mp_exchange_view(self->state->exchange, tensor, view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, index, what);
        return -1;
    }
    return result == MP_EXCHANGE_OK && view->dtype != MP_DTYPE_NONE && view->layout == MP_LAYOUT_DENSE &&
           view->numel == self->rows[index].numel && mp_view_layout_key(view) == layout &&
           (op->bucket->device == NULL || mp_view_same_device(view, op->bucket->device_type, op->bucket->device_index));
}

/* `.grad` of a tensor, a new reference; NULL for None.  0, or -1 with an exception. */
static int
get_grad(Gradients *self, size_t index, PyObject *tensor, PyObject **out)
{
    PyObject *found = tensor != NULL ? mp_attr_get(&self->grad, tensor) : Py_NewRef(Py_None);
    if (found == NULL) {
        mp_error_name(self->names, index, "reading its gradient");
        return -1;
    }
    if (found == Py_None) {
        Py_CLEAR(found);
    }
    *out = found;
    return 0;
}

/* ---- launching -------------------------------------------------------------------------------------------------- */

static void
add_work(Gradients *self, operation *op, const mp_row *row)
{
    if (row->numel == 0) {
        return;
    }
    self->work[op->count++] = *row;
    size_t size = mp_dtype_size(row->dst_dtype);
    size += row->src != NULL ? mp_dtype_size(row->src_dtype) : 0;
    size += row->add != NULL ? mp_dtype_size(row->add_dtype) : 0;
    op->bytes += (uint64_t)row->numel * size;
}

/* Runs the collected rows on the current stream.  The GIL is released on the host when that takes long. */
static int
run(Gradients *self, operation *op, double divisor)
{
    bucket_state *bucket = op->bucket;
    mp_error err;
    mp_status status;
    void *stream = NULL;
    if (op->count == 0) {
        return 0;
    }
    if (mp_exchange_current_stream(self->state->exchange, op->any, bucket->device_type, bucket->device_index, &stream) <
        0) {
        return -1;
    }
    if (bucket->device_type != MP_DEVICE_TYPE_HOST || op->bytes <= MP_GIL_BYTES) {
        status = bucket->backend->launch_on(bucket->device, self->work, op->count, divisor, stream, &err);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        status = bucket->backend->launch_on(bucket->device, self->work, op->count, divisor, stream, &err);
        Py_END_ALLOW_THREADS
    }
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    return 0;
}

/* Changes `.grad` of leaves that were read, and of masters that get a result; goes on past errors, raises the first. */
static int
finish(Gradients *self, operation *op)
{
    PyObject *error = NULL;
    for (size_t k = 0; k < op->bucket->count; k++) {
        size_t index = op->bucket->rows[k];
        move *one = &self->moves[k];
        if (one->gradient != NULL && mp_attr_set(&self->grad, self->rows[index].leaf, Py_None) < 0) {
            mp_error_name(self->names, index, "taking its leaf's gradient");
            mp_error_collect(&error);
        }
        if (one->result != NULL && mp_attr_set(&self->grad, self->rows[index].master, one->result) < 0) {
            mp_error_name(self->names, index, "setting its gradient");
            mp_error_collect(&error);
        }
    }
    return mp_error_finish(error);
}

static inline void
prefetch(const Gradients *self, const bucket_state *bucket, size_t k)
{
    if (k + AHEAD < bucket->count) {
        const grad_row *row = &self->rows[bucket->rows[k + AHEAD]];
        mp_prefetch_tensor(row->master, row->hint);
    }
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

static int
pack_row(Gradients *self, operation *op, size_t k, const mp_view *out)
{
    size_t index = op->bucket->rows[k];
    grad_row *row = &self->rows[index];
    move *one = &self->moves[k];
    mp_view gradient, own;
    uint64_t layout;
    mp_dtype dtype;
    int flat = 1;
    if (row->special) {
        return skip(self, op, k);
    }
    if (get_grad(self, index, row->leaf, &one->gradient) < 0 || get_grad(self, index, row->master, &one->own) < 0) {
        return -1;
    }
    if (one->gradient != NULL || one->own != NULL) {
        flat = read_order(self, index, &layout, &dtype);
    }
    if (flat == 1 && one->gradient != NULL) {
        flat = read_flat(self, op, index, one->gradient, layout, 0, &gradient, "reading its leaf's gradient");
    }
    if (flat == 1 && one->own != NULL) {
        flat = read_flat(self, op, index, one->own, layout, 0, &own, "reading its gradient");
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip(self, op, k);
    }
    mp_row work = {
        .src = one->gradient != NULL ? gradient.data : NULL,
        .add = one->own != NULL ? own.data : NULL,
        .dst = part_of(row, out),
        .numel = row->numel,
        .src_dtype = one->gradient != NULL ? gradient.dtype : out->dtype,
        .add_dtype = one->own != NULL ? own.dtype : out->dtype,
        .dst_dtype = out->dtype,
    };
    if (one->gradient != NULL || one->own != NULL) {
        row->brings = 1;
    }
    else if (row->fired) {
        row->fired = FIRED_EMPTY;
    }
    add_work(self, op, &work);
    return 0;
}

PyObject *
mp_gradients_pack(Gradients *self, size_t bucket, PyObject *out, double divisor)
{
    operation op;
    mp_view view;
    if (begin(self, &op, bucket) < 0) {
        return NULL;
    }
    op.bucket->launched = 1;
    int failed = read_buffer(self, &op, out, "out", &view) < 0;
    for (size_t k = 0; !failed && k < op.bucket->count; k++) {
        prefetch(self, op.bucket, k);
        failed = pack_row(self, &op, k, &view) < 0;
    }
    failed = failed || run(self, &op, divisor) < 0 || finish(self, &op) < 0;
    return end(self, &op, failed);
}

/* ---- giving ----------------------------------------------------------------------------------------------------- */

/* Decides where the row's gradient goes: into what the master has, where `keeps`, or into the row's view.  Fills *to.
 * 1, 0 when it is left to the caller, -1 with an exception. */
static int
choose_target(Gradients *self, operation *op, size_t k, int keeps, PyObject *views, mp_view *to)
{
    size_t index = op->bucket->rows[k];
    move *one = &self->moves[k];
    uint64_t layout;
    mp_dtype dtype;
    int flat = read_order(self, index, &layout, &dtype);
    if (flat <= 0) {
        return flat;
    }
    PyObject *target = one->own;
    int ours = one->own == NULL || !keeps;
    if (ours) {
        if (views == NULL) {
            return 0;
        }
        target = PyTuple_GET_ITEM(views, (Py_ssize_t)k);
        one->result = Py_NewRef(target);
    }
    flat = read_flat(self, op, index, target, layout, ours, to, "reading where its gradient goes");
    return flat <= 0 ? flat : to->dtype == dtype;
}

/* Whether the caller wants the row left as it is.  -1 with an exception. */
static int
is_left(Gradients *self, size_t index, const uint8_t *used)
{
    if (used != NULL && !used[index]) {
        return 1;
    }
    PyObject *asked = mp_attr_get(&self->requires_grad, self->rows[index].master);
    Py_XDECREF(asked);
    if (asked == NULL) {
        mp_error_name(self->names, index, "asking whether it requires grad");
        return -1;
    }
    return asked == Py_False;
}

static int
give_row(Gradients *self, operation *op, size_t k, const mp_view *reduced, PyObject *views, double divisor,
         const uint8_t *used)
{
    size_t index = op->bucket->rows[k];
    const grad_row *row = &self->rows[index];
    mp_view to;
    int left = is_left(self, index, used);
    if (left != 0) {
        return left < 0 ? -1 : 0;
    }
    if (get_grad(self, index, row->master, &self->moves[k].own) < 0) {
        return -1;
    }
    int chosen = choose_target(self, op, k, row->cast || row->had, views, &to);
    if (chosen <= 0) {
        return chosen < 0 ? -1 : skip(self, op, k);
    }
    const char *from = part_of(row, reduced);
    if (from != to.data || reduced->dtype != to.dtype || divisor != 1) {
        mp_row work = {.src = from,
                       .dst = to.data,
                       .numel = row->numel,
                       .src_dtype = reduced->dtype,
                       .add_dtype = to.dtype,
                       .dst_dtype = to.dtype};
        add_work(self, op, &work);
    }
    return 0;
}

static int
check_views(const operation *op, PyObject *views)
{
    if (views != NULL && (size_t)PyTuple_GET_SIZE(views) != op->bucket->count) {
        PyErr_Format(PyExc_ValueError, "views: expected %zu, one per row of the bucket, found %zd", op->bucket->count,
                     PyTuple_GET_SIZE(views));
        return -1;
    }
    return 0;
}

PyObject *
mp_gradients_give(Gradients *self, size_t bucket, PyObject *reduced, PyObject *views, double divisor,
                       const uint8_t *used)
{
    operation op;
    mp_view view;
    if (begin(self, &op, bucket) < 0) {
        return NULL;
    }
    int failed = check_views(&op, views) < 0 || read_buffer(self, &op, reduced, "reduced", &view) < 0;
    for (size_t k = 0; !failed && k < op.bucket->count; k++) {
        prefetch(self, op.bucket, k);
        failed = give_row(self, &op, k, &view, views, divisor, used) < 0;
    }
    failed = failed || run(self, &op, divisor) < 0 || finish(self, &op) < 0;
    return end(self, &op, failed);
}

/* ---- accumulating ----------------------------------------------------------------------------------------------- */

static int
accumulate_row(Gradients *self, operation *op, size_t k, PyObject *views)
{
    size_t index = op->bucket->rows[k];
    const grad_row *row = &self->rows[index];
    move *one = &self->moves[k];
    mp_view gradient, to;
    uint64_t layout;
    mp_dtype dtype;
    if (row->special) {
        return skip(self, op, k);
    }
    if (get_grad(self, index, row->leaf, &one->gradient) < 0) {
        return -1;
    }
    if (one->gradient == NULL) {
        return 0;
    }
    if (get_grad(self, index, row->master, &one->own) < 0) {
        return -1;
    }
    int flat = read_order(self, index, &layout, &dtype);
    if (flat == 1) {
        flat = read_flat(self, op, index, one->gradient, layout, 0, &gradient, "reading its leaf's gradient");
    }
    if (flat == 1) {
        op->any = one->gradient;
        flat = use_device(self, op->bucket, &gradient) < 0 ? -1 : choose_target(self, op, k, 1, views, &to);
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip(self, op, k);
    }
    mp_row work = {.src = gradient.data,
                   .add = one->own != NULL ? to.data : NULL,
                   .dst = to.data,
                   .numel = row->numel,
                   .src_dtype = gradient.dtype,
                   .add_dtype = to.dtype,
                   .dst_dtype = to.dtype};
    add_work(self, op, &work);
    return 0;
}

PyObject *
mp_gradients_accumulate(Gradients *self, size_t bucket, PyObject *views)
{
    operation op;
    if (begin(self, &op, bucket) < 0) {
        return NULL;
    }
    int failed = check_views(&op, views) < 0;
    for (size_t k = 0; !failed && k < op.bucket->count; k++) {
        prefetch(self, op.bucket, k);
        failed = accumulate_row(self, &op, k, views) < 0;
    }
    failed = failed || run(self, &op, 1.0) < 0 || finish(self, &op) < 0;
    return end(self, &op, failed);
}
