/* Moving gradients of a bucket between `.grad` and flat memory: pack, hand over, accumulate.
 *
 * Flat.  Buckets are packed row after row without gaps, each row in the memory order of its parameter.  A tensor is
 * read flat when it is dense and has its parameter's strides; rows for which some tensor is not are left untouched and
 * returned by number: the caller does those with PyTorch's own operations, and then settles them.
 *
 * Order of every operation: look at everything, launch, and only then change `.grad`.  A failure before the first
 * change leaves all as it was.  A failure after goes on with the other rows; a stash is dropped only when its row is
 * done, so that abort() can put back the rest.
 *
 * Streams.  Launches go to the current stream.  Gradients are let go right after: memory that the allocator then uses
 * again on that stream is used in order.
 */
#include "python/gradients.h"

/* What one operation decided for a row. */
enum action {
    ACTION_SKIP = 0,   /* returned to the caller */
    ACTION_LEAVE = 1,  /* nothing to do */
    ACTION_PACKED = 2, /* `.grad` becomes None, the stash stays */
    ACTION_BACK = 3,   /* `.grad` becomes the stash, unchanged; synced or local as before */
    ACTION_LOCAL = 4,  /* `.grad` becomes result[k], which holds what other ranks do not have */
    ACTION_SYNCED = 5, /* `.grad` becomes result[k], equal on all ranks */
};

/* One operation on one bucket: what it collects until it launches. */
typedef struct operation {
    grad_bucket *bucket;
    PyObject *skipped;   /* owned list of rows for the caller */
    PyObject *any;       /* borrowed; a tensor of the device that lends its type for the current stream */
    size_t count;        /* rows in work[0...] */
    size_t sums;         /* rows in the second half of work, for a launch after the first */
    uint64_t bytes;
} operation;

static int
operation_begin(Gradients *self, operation *op, size_t bucket)
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
operation_end(Gradients *self, operation *op, int failed)
{
    for (size_t k = 0; k < op->bucket->count; k++) {
        self->action[k] = ACTION_SKIP;
        Py_CLEAR(self->held[k]);
        Py_CLEAR(self->result[k]);
    }
    mp_gradients_leave(self);
    if (failed) {
        Py_CLEAR(op->skipped);
    }
    return op->skipped;
}

static int
skip_row(operation *op, size_t row)
{
    return mp_list_append_index(op->skipped, row);
}

/* Reads a flat buffer of the bucket: `out` of pack(), `reduced` of hand_over(). */
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
    if (view->ndim != 1 || view->layout != MP_LAYOUT_DENSE || view->numel != op->bucket->numel) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a contiguous tensor of 1 dimension and %lld elements, got %lld elements in %d "
                     "dimensions%s",
                     what, (long long)op->bucket->numel, (long long)view->numel, view->ndim,
                     view->layout == MP_LAYOUT_DENSE ? "" : ", not dense");
        return -1;
    }
    if (view->dtype == MP_DTYPE_NONE) {
        PyErr_Format(PyExc_TypeError, "%s: expected float64, float32, bfloat16 or float16", what);
        return -1;
    }
    op->any = tensor;
    return mp_gradients_use_device(self, view, what);
}

/* Where the row's elements are in a flat buffer of its bucket. */
static char *
part_of(const Gradients *self, const mp_view *buffer, size_t row)
{
    return (char *)buffer->data + self->offsets[row] * (int64_t)mp_dtype_size(buffer->dtype);
}

/* 1 when the parameter defines a memory order that others can be compared with, 0 when not, -1 with an exception. */
static int
read_param(Gradients *self, size_t row, mp_view *view)
{
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_layout(self->state->exchange, self->params[row], view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading its strides");
        return -1;
    }
    if (result == MP_EXCHANGE_REFUSED) {
        return 0;
    }
    if (view->numel != self->numels[row]) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': has %lld elements now: expected %lld",
                     mp_gradients_name(self, row), (long long)view->numel, (long long)self->numels[row]);
        return -1;
    }
    return view->layout == MP_LAYOUT_DENSE;
}

/* 1 when `tensor` can be read and written flat in the parameter's memory order, 0 when not, -1 with an exception.
 * `ours`: a view that the caller made for gradients, or what an earlier hand_over() left: it has no negative bit. */
static int
read_flat(Gradients *self, size_t row, PyObject *tensor, const mp_view *param, int ours, mp_view *view,
          const char *what)
{
    const char *why = NULL;
    mp_exchange_result result = ours ? mp_exchange_layout(self->state->exchange, tensor, view, &why)
                                     : mp_exchange_view(self->state->exchange, tensor, view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, what);
        return -1;
    }
    if (result == MP_EXCHANGE_REFUSED || view->dtype == MP_DTYPE_NONE || view->layout != MP_LAYOUT_DENSE ||
        !mp_view_same_layout(view, param)) {
        return 0;
    }
    if (self->backend == NULL && mp_gradients_use_device(self, view, what) < 0) {
        return -1;
    }
    return mp_view_same_device(view, self->device_type, self->device_index);
}

static void
add_work(Gradients *self, operation *op, const mp_row *row, int after)
{
    if (row->numel == 0) {
        return;
    }
    size_t index = after ? op->bucket->count + op->sums++ : op->count++;
    self->work[index] = *row;
    mp_row_count_bytes(row, &op->bytes, &op->bytes);
}

static mp_status
launch_unlocked(const Gradients *self, const operation *op, const mp_row *rows, size_t count, double divisor,
                void *stream, mp_error *err)
{
    mp_status status;
    if (self->device_type != MP_DEVICE_TYPE_HOST || op->bytes <= MP_GIL_BYTES) {
        return self->backend->launch_on(self->device, rows, count, divisor, stream, err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = self->backend->launch_on(self->device, rows, count, divisor, stream, err);
    Py_END_ALLOW_THREADS
    return status;
}

/* Runs the collected rows on the current stream: those before with `divisor`, then the sums with 1. */
static int
launch(Gradients *self, operation *op, double divisor)
{
    mp_error err;
    mp_status status = MP_OK;
    void *stream = NULL;
    if (op->count == 0 && op->sums == 0) {
        return 0;
    }
    if (mp_exchange_current_stream(self->state->exchange, op->any, self->device_type, self->device_index,
                                   &stream) < 0) {
        return -1;
    }
    if (op->count > 0) {
        status = launch_unlocked(self, op, self->work, op->count, divisor, stream, &err);
    }
    if (status == MP_OK && op->sums > 0) {
        status = launch_unlocked(self, op, self->work + op->bucket->count, op->sums, 1.0, stream, &err);
    }
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    return 0;
}

/* Remembers what the row's `.grad` is now; `synced`: it is equal on all ranks. */
static void
remember_left(Gradients *self, size_t row, PyObject *value, int64_t version, int synced)
{
    Py_XSETREF(self->left[row], Py_XNewRef(value));
    self->left_version[row] = version;
    self->left_own[row] = !synced;
    if (synced) {
        Py_CLEAR(self->base[row]);
    }
}

/* The version counter of what the row is given.  Views of one buffer share theirs, so that it is read once for all. */
static int
version_of_result(Gradients *self, size_t row, size_t k, int64_t *of_views, int64_t *out)
{
    PyObject *value = self->result[k];
    if (value == self->stash[row] || value == self->held[k]) {
        return mp_gradients_version(self, row, value, out);
    }
    if (*of_views == MP_WRITTEN && mp_gradients_version(self, row, value, of_views) < 0) {
        return -1;
    }
    *out = *of_views;
    return 0;
}

/* `.grad` becomes `value` (NULL: None), and the stash is let go. */
static int
give(Gradients *self, size_t row, PyObject *value)
{
    if (mp_gradients_set(self, row, value) < 0) {
        return -1;
    }
    int kept = self->stash[row] != NULL && value == self->stash[row];
    if (self->phase[row] != PHASE_IDLE) { /* outside a backward there is nothing that abort() could undo */
        self->phase[row] = kept ? PHASE_KEPT : PHASE_FRESH;
    }
    Py_CLEAR(self->stash[row]);
    return 0;
}

/* Gives the row its new gradient, and remembers it where it is not the one that was set aside. */
static int
finish_row(Gradients *self, size_t row, size_t k, int64_t *of_views)
{
    enum action action = (enum action)self->action[k];
    PyObject *value = action == ACTION_BACK ? self->stash[row] : self->result[k];
    int64_t version = 0;
    if (action != ACTION_BACK && version_of_result(self, row, k, of_views, &version) < 0) {
        return -1;
    }
    if (give(self, row, value) < 0) {
        return -1;
    }
    if (action != ACTION_BACK) {
        remember_left(self, row, value, version, action == ACTION_SYNCED);
    }
    return 0;
}

/* Changes `.grad` of every row as decided; goes on past errors and raises the first. */
static int
finish(Gradients *self, operation *op)
{
    PyObject *error = NULL;
    int64_t of_views = MP_WRITTEN; /* not read yet */
    for (size_t k = 0; k < op->bucket->count; k++) {
        size_t row = op->bucket->rows[k];
        int result = 0;
        switch (self->action[k]) {
        case ACTION_SKIP:
        case ACTION_LEAVE:
            break;
        case ACTION_PACKED:
            result = self->held[k] != NULL ? mp_gradients_set(self, row, NULL) : 0;
            break;
        default:
            result = finish_row(self, row, k, &of_views);
        }
        if (result < 0) {
            mp_error_collect(&error);
        }
    }
    return mp_error_finish(error);
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

static int
pack_row(Gradients *self, operation *op, size_t k, const mp_view *out)
{
    size_t row = op->bucket->rows[k];
    mp_view param, grad, stash;
    int flat = 1;
    PyObject *aside = mp_gradients_reduces_stash(self, row) ? self->stash[row] : NULL;
    if (self->base[row] != NULL) {
        return skip_row(op, row);
    }
    if (mp_gradients_get(self, row, &self->held[k]) < 0) {
        return -1;
    }
    if (self->held[k] != NULL || aside != NULL) {
        flat = read_param(self, row, &param);
    }
    else if (self->fired[row]) {
        self->fired[row] = FIRED_EMPTY;
    }
    if (flat == 1 && self->held[k] != NULL) {
        flat = read_flat(self, row, self->held[k], &param, 0, &grad, "reading its gradient");
    }
    if (flat == 1 && aside != NULL) {
        flat = read_flat(self, row, aside, &param, self->known[row], &stash, "reading the gradient set aside");
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip_row(op, row);
    }
    mp_row work = {
        .src = self->held[k] != NULL ? grad.data : NULL,
        .add = aside != NULL ? stash.data : NULL,
        .dst = part_of(self, out, row),
        .numel = self->numels[row],
        .src_dtype = self->held[k] != NULL ? grad.dtype : out->dtype,
        .add_dtype = aside != NULL ? stash.dtype : MP_F32,
        .dst_dtype = out->dtype,
    };
    add_work(self, op, &work, 0);
    self->action[k] = ACTION_PACKED;
    return 0;
}

static int
pack(Gradients *self, operation *op, PyObject *out, double divisor)
{
    mp_view view;
    if (read_buffer(self, op, out, "out", &view) < 0) {
        return -1;
    }
    for (size_t k = 0; k < op->bucket->count; k++) {
        if (k + MP_GRADIENTS_AHEAD < op->bucket->count) {
            mp_gradients_prefetch(self, op->bucket->rows[k + MP_GRADIENTS_AHEAD]);
        }
        if (pack_row(self, op, k, &view) < 0) {
            return -1;
        }
    }
    if (launch(self, op, divisor) < 0) {
        return -1;
    }
    return finish(self, op);
}

/* ---- handing over ----------------------------------------------------------------------------------------------- */

/* What hand_over() is given, read. */
typedef struct handover {
    mp_view reduced;
    PyObject *views; /* borrowed tuple, or NULL */
    double divisor;
    const uint8_t *used; /* one byte a row, or NULL: all are */
} handover;

/* The tensor that the gradient of position k goes to: the stash, else views[k] (borrowed). */
static PyObject *
destination(Gradients *self, size_t row, size_t k, PyObject *views)
{
    if (self->stash[row] != NULL) {
        return self->stash[row];
    }
    return views != NULL ? PyTuple_GET_ITEM(views, (Py_ssize_t)k) : NULL;
}

/* Whether writing dst while reading `reduced` would disturb other rows, or this one's sum. */
static int
check_overlap(Gradients *self, size_t row, const mp_view *dst, const mp_view *reduced, int in_place)
{
    uintptr_t a = (uintptr_t)dst->data, b = (uintptr_t)reduced->data;
    uintptr_t a_end = a + (uintptr_t)dst->numel * mp_dtype_size(dst->dtype);
    uintptr_t b_end = b + (uintptr_t)reduced->numel * mp_dtype_size(reduced->dtype);
    if (dst->numel == 0 || a >= b_end || b >= a_end || in_place) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "parameter '%U': its gradient overlaps the reduced buffer without being exactly its part of it",
                 mp_gradients_name(self, row));
    return -1;
}

/* Rows for a gradient that goes to `dst`.  (part + dst) / divisor is not what a sum needs, so that with a divisor the
 * part is divided in place first and added in a second launch: the price of a rare case. */
static void
give_work(Gradients *self, operation *op, size_t row, const handover *give, const mp_view *dst, int sum, int in_place)
{
    char *part = part_of(self, &give->reduced, row);
    mp_row work = {
        .src = part,
        .add = NULL,
        .dst = dst->data,
        .numel = self->numels[row],
        .src_dtype = give->reduced.dtype,
        .add_dtype = MP_F32,
        .dst_dtype = dst->dtype,
    };
    if (!sum) {
        if (!in_place || give->divisor != 1.0) {
            add_work(self, op, &work, 0);
        }
        return;
    }
    mp_row total = work;
    total.add = dst->data;
    total.add_dtype = dst->dtype;
    if (give->divisor != 1.0) {
        work.dst = part;
        work.dst_dtype = give->reduced.dtype;
        add_work(self, op, &work, 0);
    }
    add_work(self, op, &total, give->divisor != 1.0);
}

/* Asks for the parameter and the view of position k.  Where a view lies is asked once, as long as it is the same. */
static void
prefetch_give(Gradients *self, const operation *op, size_t k, PyObject *views)
{
    if (k >= op->bucket->count) {
        return;
    }
    size_t row = op->bucket->rows[k];
    mp_gradients_prefetch(self, row);
    if (views == NULL) {
        return;
    }
    PyObject *view = PyTuple_GET_ITEM(views, (Py_ssize_t)k);
    if (view != self->views[row]) {
        self->views[row] = view;
        Py_INCREF(view); /* a subclass may run anything */
        self->view_hints[row] = mp_hint_of(view);
        Py_DECREF(view);
    }
    mp_prefetch_tensor(view, self->view_hints[row]);
}

static int
give_row(Gradients *self, operation *op, size_t k, const handover *give)
{
    size_t row = op->bucket->rows[k];
    mp_view param, view;
    if (give->used != NULL && !give->used[row]) {
        self->action[k] = self->phase[row] == PHASE_ASIDE ? ACTION_BACK : ACTION_LEAVE;
        return 0;
    }
    if (self->base[row] != NULL) {
        return skip_row(op, row);
    }
    PyObject *target = destination(self, row, k, give->views);
    if (target == NULL) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': no gradient was set aside and no view is given to put it into",
                     mp_gradients_name(self, row));
        return -1;
    }
    int flat = read_param(self, row, &param);
    if (flat == 1) {
        int ours = self->stash[row] == NULL || self->known[row];
        flat = read_flat(self, row, target, &param, ours, &view, "reading where its gradient goes");
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip_row(op, row);
    }
    int sum = self->stash[row] != NULL && !mp_gradients_reduces_stash(self, row);
    int in_place = !sum && (char *)view.data == part_of(self, &give->reduced, row) && view.dtype == give->reduced.dtype;
    if (check_overlap(self, row, &view, &give->reduced, in_place) < 0) {
        return -1;
    }
    give_work(self, op, row, give, &view, sum, in_place);
    self->result[k] = Py_NewRef(target);
    self->action[k] = ACTION_SYNCED;
    return 0;
}

static int
hand_over(Gradients *self, operation *op, PyObject *reduced, handover *give)
{
    if (read_buffer(self, op, reduced, "reduced", &give->reduced) < 0) {
        return -1;
    }
    for (size_t k = 0; k < op->bucket->count; k++) {
        prefetch_give(self, op, k + MP_GRADIENTS_AHEAD, give->views);
        if (give_row(self, op, k, give) < 0) {
            return -1;
        }
    }
    if (launch(self, op, give->divisor) < 0) {
        return -1;
    }
    return finish(self, op);
}

/* ---- accumulating ----------------------------------------------------------------------------------------------- */

static int
keep_row(Gradients *self, operation *op, size_t k, const mp_view *param)
{
    size_t row = op->bucket->rows[k];
    mp_view grad;
    const char *why = NULL;
    if (mp_exchange_view(self->state->exchange, self->held[k], &grad, &why) != MP_EXCHANGE_OK ||
        grad.dtype != param->dtype) {
        PyErr_Clear();
        return skip_row(op, row);
    }
    self->result[k] = Py_NewRef(self->held[k]);
    self->action[k] = ACTION_LOCAL;
    return 0;
}

static int
accumulate_row(Gradients *self, operation *op, size_t k, PyObject *views)
{
    size_t row = op->bucket->rows[k];
    mp_view param, grad, dst;
    if (self->phase[row] != PHASE_ASIDE) {
        self->action[k] = ACTION_LEAVE; /* done before in this backward, or never begun */
        return 0;
    }
    if (mp_gradients_get(self, row, &self->held[k]) < 0) {
        return -1;
    }
    if (self->held[k] == NULL) {
        self->action[k] = ACTION_BACK;
        return 0;
    }
    int flat = read_param(self, row, &param);
    PyObject *target = destination(self, row, k, views);
    if (flat == 1 && target == NULL) {
        return keep_row(self, op, k, &param);
    }
    if (flat == 1) {
        flat = read_flat(self, row, self->held[k], &param, 0, &grad, "reading its gradient");
    }
    if (flat == 1) {
        int ours = self->stash[row] == NULL || self->known[row];
        flat = read_flat(self, row, target, &param, ours, &dst, "reading where its gradient goes");
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip_row(op, row);
    }
    int sum = self->stash[row] != NULL;
    mp_row work = {
        .src = grad.data,
        .add = sum ? dst.data : NULL,
        .dst = dst.data,
        .numel = self->numels[row],
        .src_dtype = grad.dtype,
        .add_dtype = sum ? dst.dtype : MP_F32,
        .dst_dtype = dst.dtype,
    };
    if (sum || grad.data != dst.data || grad.dtype != dst.dtype) {
        add_work(self, op, &work, 0);
    }
    op->any = self->held[k];
    self->result[k] = Py_NewRef(target);
    self->action[k] = ACTION_LOCAL;
    return 0;
}

static int
accumulate(Gradients *self, operation *op, PyObject *views)
{
    for (size_t k = 0; k < op->bucket->count; k++) {
        if (accumulate_row(self, op, k, views) < 0) {
            return -1;
        }
    }
    if (launch(self, op, 1.0) < 0) {
        return -1;
    }
    return finish(self, op);
}

/* ---- what gradients.h promises ---------------------------------------------------------------------------------- */

PyObject *
mp_gradients_pack(Gradients *self, size_t bucket, PyObject *out, double divisor)
{
    operation op;
    if (operation_begin(self, &op, bucket) < 0) {
        return NULL;
    }
    return operation_end(self, &op, pack(self, &op, out, divisor) < 0);
}

PyObject *
mp_gradients_hand_over(Gradients *self, size_t bucket, PyObject *reduced, PyObject *views, double divisor,
                       const uint8_t *used)
{
    operation op;
    handover give = {.views = views, .divisor = divisor, .used = used};
    if (operation_begin(self, &op, bucket) < 0) {
        return NULL;
    }
    return operation_end(self, &op, hand_over(self, &op, reduced, &give) < 0);
}

PyObject *
mp_gradients_accumulate(Gradients *self, size_t bucket, PyObject *views)
{
    operation op;
    if (operation_begin(self, &op, bucket) < 0) {
        return NULL;
    }
    return operation_end(self, &op, accumulate(self, &op, views) < 0);
}

/* What finish_row() does, for a row whose gradient the caller has made. */
int
mp_gradients_settle(Gradients *self, size_t row, PyObject *grad, int synced)
{
    int64_t version = 0;
    if ((grad != NULL && mp_gradients_version(self, row, grad, &version) < 0) || give(self, row, grad) < 0) {
        return -1;
    }
    remember_left(self, row, grad, version, synced);
    return 0;
}
