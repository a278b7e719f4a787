/* Gradients: which gradients of one device are ready, and moving them between `.grad` and flat buffers.
 *
 * A backward is begin(), hooks that fire, then for every bucket either pack() + hand_over() around a reduction or
 * accumulate() without one, and end().  begin() sets full-precision gradients of earlier backwards aside (stash), so that
 * autograd leaves this backward's gradient alone in `.grad`, in whatever type it computes.
 *
 * Flat.  Buckets are packed row after row without gaps, each row in the memory order of its parameter.  A tensor is read
 * flat when it is dense and has its parameter's strides; rows for which some tensor is not are left untouched and
 * returned by number: the caller does those with PyTorch's own operations, and then settle()s them.
 *
 * Order of every operation: look at everything, launch, and only then change `.grad`.  A failure before the first
 * change leaves all as it was.  A failure after goes on with the other rows; a stash is dropped only when its row is
 * done, so that abort() can put back the rest.
 *
 * Threads.  As for Engine: the GIL serialises, `busy` covers calls into Python and launches without the GIL.  Hooks may
 * fire meanwhile; they touch flags and counts only.
 */
#include "module.h"

#include <math.h>
#include <string.h>
#include <structmember.h>

#include "attr.h"
#include "functions.h"
#include "pyutil.h"

/* Where a row's gradient from before begin() is now. */
enum phase {
    PHASE_IDLE = 0,  /* no backward, or one that ended: `.grad` is the caller's */
    PHASE_ASIDE = 1, /* in the stash; NULL there: there was none */
    PHASE_KEPT = 2,  /* given back in this backward, as the same object: abort() leaves it */
    PHASE_FRESH = 3, /* there was none and this backward has given one: abort() takes it away */
};

/* What one operation decided for a row. */
enum action {
    ACTION_SKIP = 0,   /* returned to the caller */
    ACTION_LEAVE = 1,  /* nothing to do */
    ACTION_PACKED = 2, /* `.grad` becomes None, the stash stays */
    ACTION_BACK = 3,   /* `.grad` becomes the stash, unchanged; synced or local as before */
    ACTION_LOCAL = 4,  /* `.grad` becomes result[k], which holds what other ranks do not have */
    ACTION_SYNCED = 5, /* `.grad` becomes result[k], equal on all ranks */
};

typedef struct grad_bucket {
    size_t *rows; /* in packing order; points into Gradients.order */
    size_t count;
    int64_t numel;
    size_t pending; /* rows that have not fired since reset() */
    int launched;
    mp_table *pack_table; /* owned; NULL until first used.  Two tables: in steady state neither changes */
    mp_table *give_table;
} grad_bucket;

typedef struct Gradients {
    PyObject_HEAD
    mp_state *state;           /* borrowed from the module, which the type keeps alive */
    const mp_backend *backend; /* NULL until the device is known */
    mp_device *device;
    int device_type, device_index;

    /* By row.  row_count is set once all arrays exist. */
    size_t row_count;
    PyObject **params; /* owned */
    PyObject **stash;  /* owned; NULL: nothing set aside */
    PyObject **handed; /* owned; what hand_over() left in `.grad`: owned so that its address is not used again.  Dropped
                          by the next begin() that finds something else */
    int64_t *numels;
    int64_t *offsets; /* elements from the start of the packed bucket */
    size_t *bucket_of;
    size_t *position; /* in its bucket */
    uint8_t *synced; /* the stash is what hand_over() left */
    uint8_t *phase;
    uint8_t *fired;
    PyObject *names; /* owned tuple of str */

    size_t bucket_count;
    grad_bucket *buckets;
    size_t *order; /* rows, bucket by bucket */

    PyObject *on_first; /* owned */
    PyObject *on_ready; /* owned */
    mp_attr grad;
    int active;
    int early;
    int busy;
    Py_ssize_t fires; /* hooks that fired since begin() */
    int refired;      /* some row fired more than once since reset() */

    /* Scratch of the operation that holds `busy`, by position in its bucket. */
    mp_row *work;      /* two a position: a second launch may follow the first */
    PyObject **held;   /* owned during the operation: the gradients that `work` points into */
    PyObject **result; /* owned during the operation: what `.grad` becomes */
    uint8_t *action;
    PyObject *weakrefs;
} Gradients;

/* Its parameter owns the hook, and Gradients owns the parameter; torch does not show the garbage collector a tensor's
 * hooks, so that a strong reference would be a cycle that nothing ever collects. */
typedef struct FireHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *gradients; /* owned weak reference */
    size_t row;
} FireHook;

/* One operation on one bucket: what it collects until it launches. */
typedef struct operation {
    grad_bucket *bucket;
    PyObject *skipped;   /* owned list of rows for the caller */
    PyObject *any;       /* borrowed; a tensor of the device that lends its type for the current stream */
    size_t count;        /* rows in work[0...] */
    size_t sums;         /* rows in the second half of work, for a launch after the first */
    uint64_t bytes;
} operation;

static PyObject *
row_name(const Gradients *self, size_t row)
{
    return PyTuple_GET_ITEM(self->names, (Py_ssize_t)row);
}

static int
enter(Gradients *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this Gradients is in use: called from within one of its own operations, or "
                                            "from another thread during one");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static void
leave(Gradients *self)
{
    self->busy = 0;
}

static int
set_grad(Gradients *self, size_t row, PyObject *value)
{
    if (mp_attr_set(&self->grad, self->params[row], value != NULL ? value : Py_None) < 0) {
        mp_error_name(self->names, row, value != NULL ? "setting its gradient" : "taking its gradient away");
        return -1;
    }
    return 0;
}

/* *out becomes the gradient, a new reference, or NULL when there is none.  0, or -1 with an exception. */
static int
get_grad(Gradients *self, size_t row, PyObject **out)
{
    PyObject *grad = mp_attr_get(&self->grad, self->params[row]);
    if (grad == NULL) {
        mp_error_name(self->names, row, "reading its gradient");
        *out = NULL;
        return -1;
    }
    if (grad == Py_None) {
        Py_CLEAR(grad);
    }
    *out = grad;
    return 0;
}

/* ---- readiness -------------------------------------------------------------------------------------------------- */

static int
call_with(PyObject *callable, size_t number)
{
    PyObject *argument = PyLong_FromSize_t(number);
    if (argument == NULL) {
        return -1;
    }
    PyObject *result = PyObject_CallOneArg(callable, argument);
    Py_DECREF(argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static void
raise_twice(const Gradients *self, size_t row)
{
    PyErr_Format(PyExc_RuntimeError,
                 "Expected to mark a variable ready only once. Parameter '%U' received a gradient after the bucket it is "
                 "in had been reduced, so that this gradient would be missing on the other ranks. Likely causes: the "
                 "parameter is used in several reentrant checkpoints, or backward ran several times over one forward. "
                 "Use checkpointing with use_reentrant=False, or static_graph=True if the graph is the same in every "
                 "iteration.",
                 row_name(self, row));
}

static int
fire(Gradients *self, size_t row)
{
    if (!self->active) {
        if (call_with(self->on_first, row) < 0) {
            return -1;
        }
    }
    grad_bucket *bucket = &self->buckets[self->bucket_of[row]];
    if (bucket->launched) {
        raise_twice(self, row);
        return -1;
    }
    self->fires++;
    if (self->fired[row]) {
        self->refired = 1; /* accumulated once more before the reduction: nothing is lost */
        return 0;
    }
    self->fired[row] = 1;
    bucket->pending--;
    if (bucket->pending == 0 && self->early) {
        return call_with(self->on_ready, self->bucket_of[row]);
    }
    return 0;
}

/* A new reference, or NULL when there is none any more. */
static Gradients *
hook_owner(const FireHook *hook)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *owner = NULL;
    (void)PyWeakref_GetRef(hook->gradients, &owner); /* fails only for what is no weak reference */
    return (Gradients *)owner;
#else
    PyObject *owner = PyWeakref_GetObject(hook->gradients);
    return owner == Py_None ? NULL : (Gradients *)Py_NewRef(owner);
#endif
}

static PyObject *
fire_hook_call(PyObject *callable, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf),
               PyObject *Py_UNUSED(kwnames))
{
    size_t row = ((FireHook *)callable)->row;
    Gradients *gradients = hook_owner((FireHook *)callable);
    int result = gradients != NULL && gradients->row_count > 0 ? fire(gradients, row) : 0;
    Py_XDECREF(gradients);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static void
fire_hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((FireHook *)object)->gradients);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef fire_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FireHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot fire_hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, fire_hook_dealloc},
    {Py_tp_members, fire_hook_members},
    {Py_tp_doc, "A post-accumulate-grad hook: the parameter's gradient is there."},
    {0, NULL},
};

static PyType_Spec fire_hook_spec = {
    .name = "ddp_mp._C.FireHook",
    .basicsize = sizeof(FireHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = fire_hook_slots,
};

/* Starts the next round of readiness. */
static void
reset(Gradients *self)
{
    memset(self->fired, 0, self->row_count);
    self->refired = 0;
    for (size_t i = 0; i < self->bucket_count; i++) {
        self->buckets[i].pending = self->buckets[i].count;
        self->buckets[i].launched = 0;
    }
}

/* What was handed over is the caller's from now on, and so is what was never aside: a later abort() must not touch
 * gradients that no begin() has seen.  A stash that nobody gave back stays for abort(). */
static void
end(Gradients *self)
{
    self->active = 0;
    self->early = 0;
    for (size_t row = 0; row < self->row_count; row++) {
        if (self->phase[row] != PHASE_ASIDE || self->stash[row] == NULL) {
            self->phase[row] = PHASE_IDLE;
        }
    }
}

/* ---- setting aside ---------------------------------------------------------------------------------------------- */

/* Reads every `.grad` into fresh[row], but that of `fired_row`, where it is this backward's already.  Refuses where
 * something from an earlier backward is still aside and `.grad` is empty: going on would lose it.  Where `.grad` has been
 * set since, that is what counts. */
static int
read_all(Gradients *self, PyObject **fresh, Py_ssize_t fired_row)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if ((Py_ssize_t)row != fired_row && get_grad(self, row, &fresh[row]) < 0) {
            return -1;
        }
        if (fresh[row] == NULL && self->stash[row] != NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "parameter '%U': the gradient that an earlier backward set aside was never given back: abort() first",
                         row_name(self, row));
            return -1;
        }
    }
    return 0;
}

static int
take_all(Gradients *self, PyObject **fresh)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if (fresh[row] == NULL || set_grad(self, row, NULL) == 0) {
            continue;
        }
        PyObject *error = mp_error_take();
        while (row-- > 0) {
            if (fresh[row] != NULL && set_grad(self, row, fresh[row]) < 0) {
                mp_error_collect(&error);
            }
        }
        return mp_error_finish(error);
    }
    return 0;
}

static Py_ssize_t
begin(Gradients *self, int early, Py_ssize_t fired_row)
{
    Py_ssize_t count = 0;
    PyObject **fresh = PyMem_Calloc(self->row_count > 0 ? self->row_count : 1, sizeof *fresh);
    if (fresh == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (read_all(self, fresh, fired_row) < 0 || take_all(self, fresh) < 0) {
        count = -1;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        PyObject *grad = fresh[row];
        if (count < 0) {
            Py_XDECREF(grad);
            continue;
        }
        self->phase[row] = PHASE_ASIDE;
        self->synced[row] = grad != NULL && grad == self->handed[row];
        count += grad != NULL;
        Py_XSETREF(self->stash[row], grad);
        if (!self->synced[row]) {
            Py_CLEAR(self->handed[row]);
        }
    }
    PyMem_Free(fresh);
    if (count >= 0) {
        self->active = 1;
        self->early = early;
        self->fires = 0;
    }
    return count;
}

/* Puts one row back to what it was before begin(). */
static int
abort_row(Gradients *self, size_t row)
{
    if (self->phase[row] == PHASE_ASIDE || self->phase[row] == PHASE_FRESH) {
        if (set_grad(self, row, self->stash[row]) < 0) {
            return -1;
        }
        Py_CLEAR(self->stash[row]);
        if (!self->synced[row]) {
            Py_CLEAR(self->handed[row]);
        }
    }
    self->phase[row] = PHASE_IDLE;
    return 0;
}

static int
abort_all(Gradients *self)
{
    PyObject *error = NULL;
    for (size_t row = 0; row < self->row_count; row++) {
        if (abort_row(self, row) < 0) {
            mp_error_collect(&error);
        }
    }
    end(self);
    reset(self);
    return mp_error_finish(error);
}

/* ---- one operation on a bucket ---------------------------------------------------------------------------------- */

static int
operation_begin(Gradients *self, operation *op, Py_ssize_t bucket)
{
    *op = (operation){.bucket = &self->buckets[bucket]};
    if (enter(self) < 0) {
        return -1;
    }
    op->skipped = PyList_New(0);
    if (op->skipped == NULL) {
        leave(self);
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
    leave(self);
    if (failed) {
        Py_CLEAR(op->skipped);
    }
    return op->skipped;
}

static int
skip_row(operation *op, size_t row)
{
    PyObject *number = PyLong_FromSize_t(row);
    int result = number != NULL ? PyList_Append(op->skipped, number) : -1;
    Py_XDECREF(number);
    return result;
}

/* The device comes with the first tensor that is seen; there is one for all. */
static int
use_device(Gradients *self, const mp_view *view, const char *what)
{
    mp_error err;
    if (self->backend != NULL) {
        if (mp_view_same_device(view, self->device_type, self->device_index)) {
            return 0;
        }
        PyErr_Format(PyExc_ValueError, "%s is on device (%d, %d): expected (%d, %d), as all of this Gradients", what,
                     view->device_type, view->device_index, self->device_type, self->device_index);
        return -1;
    }
    const mp_backend *backend = mp_backend_for(view->device_type);
    if (backend == NULL) {
        return -1;
    }
    if (backend->open(view->device_index, &self->device, &err) != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    self->backend = backend;
    self->device_type = view->device_type;
    self->device_index = view->device_index;
    return 0;
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
                     "%s: expected a contiguous tensor of 1 dimension and %lld elements, got %lld elements in %d dimensions%s",
                     what, (long long)op->bucket->numel, (long long)view->numel, view->ndim,
                     view->layout == MP_LAYOUT_DENSE ? "" : ", not dense");
        return -1;
    }
    if (view->dtype == MP_DTYPE_NONE) {
        PyErr_Format(PyExc_TypeError, "%s: expected float64, float32, bfloat16 or float16", what);
        return -1;
    }
    op->any = tensor;
    return use_device(self, view, what);
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
    mp_exchange_result result = mp_exchange_view(self->state->exchange, self->params[row], view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading its strides");
        return -1;
    }
    if (result == MP_EXCHANGE_REFUSED) {
        return 0;
    }
    if (view->numel != self->numels[row]) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': has %lld elements now: expected %lld", row_name(self, row),
                     (long long)view->numel, (long long)self->numels[row]);
        return -1;
    }
    return view->layout == MP_LAYOUT_DENSE;
}

/* 1 when `tensor` can be read and written flat in the parameter's memory order, 0 when not, -1 with an exception. */
static int
read_flat(Gradients *self, size_t row, PyObject *tensor, const mp_view *param, mp_view *view, const char *what)
{
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, tensor, view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, what);
        return -1;
    }
    if (result == MP_EXCHANGE_REFUSED || view->dtype == MP_DTYPE_NONE || view->layout != MP_LAYOUT_DENSE ||
        !mp_view_same_layout(view, param)) {
        return 0;
    }
    if (self->backend == NULL && use_device(self, view, what) < 0) {
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
    size_t size = mp_dtype_size(row->dst_dtype);
    size += row->src != NULL ? mp_dtype_size(row->src_dtype) : 0;
    size += row->add != NULL ? mp_dtype_size(row->add_dtype) : 0;
    op->bytes += (uint64_t)row->numel * size;
}

static mp_status
launch_unlocked(const Gradients *self, const operation *op, mp_table *table, double divisor, void *stream, mp_error *err)
{
    mp_status status;
    if (self->device_type != MP_DEVICE_TYPE_HOST || op->bytes <= MP_GIL_BYTES) {
        return self->backend->launch_on(table, divisor, stream, err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = self->backend->launch_on(table, divisor, stream, err);
    Py_END_ALLOW_THREADS
    return status;
}

/* Runs the collected rows on the current stream: those before with `divisor`, then the sums with 1. */
static int
launch(Gradients *self, operation *op, mp_table **table, double divisor)
{
    mp_error err;
    mp_status status = MP_OK;
    void *stream = NULL;
    if (op->count == 0 && op->sums == 0) {
        return 0;
    }
    if (mp_exchange_current_stream(self->state->exchange, op->any, self->device_type, self->device_index, &stream) < 0) {
        return -1;
    }
    if (*table == NULL) {
        status = self->backend->table_new(self->device, table, &err);
    }
    if (status == MP_OK && op->count > 0) {
        status = self->backend->table_set(*table, self->work, op->count, &err);
        status = status == MP_OK ? launch_unlocked(self, op, *table, divisor, stream, &err) : status;
    }
    if (status == MP_OK && op->sums > 0) {
        status = self->backend->table_set(*table, self->work + op->bucket->count, op->sums, &err);
        status = status == MP_OK ? launch_unlocked(self, op, *table, 1.0, stream, &err) : status;
    }
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    return 0;
}

/* Gives the row its new gradient and lets go of the stash. */
static int
finish_row(Gradients *self, size_t row, size_t k)
{
    enum action action = (enum action)self->action[k];
    PyObject *value = action == ACTION_BACK ? self->stash[row] : self->result[k];
    if (set_grad(self, row, value) < 0) {
        return -1;
    }
    int kept = self->stash[row] != NULL && value == self->stash[row];
    if (action == ACTION_SYNCED) {
        Py_XSETREF(self->handed[row], Py_XNewRef(value));
    }
    else if (action == ACTION_LOCAL || !self->synced[row]) {
        Py_CLEAR(self->handed[row]);
    }
    self->phase[row] = kept ? PHASE_KEPT : PHASE_FRESH;
    Py_CLEAR(self->stash[row]);
    return 0;
}

/* Changes `.grad` of every row as decided; goes on past errors and raises the first. */
static int
finish(Gradients *self, operation *op)
{
    PyObject *error = NULL;
    for (size_t k = 0; k < op->bucket->count; k++) {
        size_t row = op->bucket->rows[k];
        int result = 0;
        switch (self->action[k]) {
        case ACTION_SKIP:
        case ACTION_LEAVE:
            break;
        case ACTION_PACKED:
            result = self->held[k] != NULL ? set_grad(self, row, NULL) : 0;
            break;
        default:
            result = finish_row(self, row, k);
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
    PyObject *aside = self->synced[row] ? NULL : self->stash[row];
    if (get_grad(self, row, &self->held[k]) < 0) {
        return -1;
    }
    if (self->held[k] != NULL || aside != NULL) {
        flat = read_param(self, row, &param);
    }
    if (flat == 1 && self->held[k] != NULL) {
        flat = read_flat(self, row, self->held[k], &param, &grad, "reading its gradient");
    }
    if (flat == 1 && aside != NULL) {
        flat = read_flat(self, row, aside, &param, &stash, "reading the gradient set aside");
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
        if (pack_row(self, op, k, &view) < 0) {
            return -1;
        }
    }
    if (launch(self, op, &op->bucket->pack_table, divisor) < 0) {
        return -1;
    }
    return finish(self, op);
}

/* ---- handing over ----------------------------------------------------------------------------------------------- */

/* What hand_over() is given, read. */
typedef struct handover {
    mp_view reduced;
    PyObject *views; /* borrowed from PySequence_Fast, or NULL */
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
    return views != NULL ? PySequence_Fast_GET_ITEM(views, (Py_ssize_t)k) : NULL;
}

/* Whether writing dst while reading `reduced` would disturb other rows, or this one's sum. */
static int
check_overlap(Gradients *self, size_t row, const mp_view *dst, const mp_view *reduced, int in_place)
{
    uintptr_t a = (uintptr_t)dst->data, b = (uintptr_t)reduced->data;
    uintptr_t a_end = a + (uintptr_t)dst->numel * mp_dtype_size(dst->dtype);
    uintptr_t b_end = b + (uintptr_t)reduced->numel * mp_dtype_size(reduced->dtype);
    if (a >= b_end || b >= a_end || in_place) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "parameter '%U': its gradient overlaps the reduced buffer without being exactly its part of it",
                 row_name(self, row));
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

static int
give_row(Gradients *self, operation *op, size_t k, const handover *give)
{
    size_t row = op->bucket->rows[k];
    mp_view param, view;
    if (give->used != NULL && !give->used[row]) {
        self->action[k] = self->phase[row] == PHASE_ASIDE ? ACTION_BACK : ACTION_LEAVE;
        return 0;
    }
    PyObject *target = destination(self, row, k, give->views);
    if (target == NULL) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': no gradient was set aside and no view is given to put it into",
                     row_name(self, row));
        return -1;
    }
    int flat = read_param(self, row, &param);
    if (flat == 1) {
        flat = read_flat(self, row, target, &param, &view, "reading where its gradient goes");
    }
    if (flat <= 0) {
        return flat < 0 ? -1 : skip_row(op, row);
    }
    int sum = self->stash[row] != NULL && self->synced[row];
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
        if (give_row(self, op, k, give) < 0) {
            return -1;
        }
    }
    if (launch(self, op, &op->bucket->give_table, give->divisor) < 0) {
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
    if (get_grad(self, row, &self->held[k]) < 0) {
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
        flat = read_flat(self, row, self->held[k], &param, &grad, "reading its gradient");
    }
    if (flat == 1) {
        flat = read_flat(self, row, target, &param, &dst, "reading where its gradient goes");
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
    if (launch(self, op, &op->bucket->give_table, 1.0) < 0) {
        return -1;
    }
    return finish(self, op);
}

/* ---- methods ---------------------------------------------------------------------------------------------------- */

static int
check_index(Py_ssize_t index, size_t count, const char *what)
{
    if (index < 0 || (size_t)index >= count) {
        PyErr_Format(PyExc_IndexError, "%s %zd: expected 0 to %zd", what, index, (Py_ssize_t)count - 1);
        return -1;
    }
    return 0;
}

/* An index given as the only argument.  -1 with an exception. */
static Py_ssize_t
parse_index(PyObject *argument, size_t count, const char *what)
{
    Py_ssize_t index = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    if ((index == -1 && PyErr_Occurred()) || check_index(index, count, what) < 0) {
        return -1;
    }
    return index;
}

static int
check_divisor(double divisor)
{
    if (!isfinite(divisor) || divisor == 0.0) {
        PyErr_SetString(PyExc_ValueError, "divisor: expected a finite number other than 0");
        return -1;
    }
    return 0;
}

/* views as PySequence_Fast gives it (new reference), or *out = NULL for None. */
static int
parse_views(const grad_bucket *bucket, PyObject *views, PyObject **out)
{
    *out = NULL;
    if (views == Py_None) {
        return 0;
    }
    PyObject *fast = PySequence_Fast(views, "views: expected a sequence of tensors or None");
    if (fast != NULL && (size_t)PySequence_Fast_GET_SIZE(fast) != bucket->count) {
        PyErr_Format(PyExc_ValueError, "views: expected %zu, one a row of the bucket, got %zd", bucket->count,
                     PySequence_Fast_GET_SIZE(fast));
        Py_CLEAR(fast);
    }
    *out = fast;
    return fast != NULL ? 0 : -1;
}

static PyObject *
gradients_hook(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    if (row < 0) {
        return NULL;
    }
    FireHook *hook = PyObject_New(FireHook, self->state->fire_hook_type);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = fire_hook_call;
    hook->row = (size_t)row;
    hook->gradients = PyWeakref_NewRef(object, NULL);
    if (hook->gradients == NULL) {
        Py_CLEAR(hook);
    }
    return (PyObject *)hook;
}

static PyObject *
gradients_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"early", "fired_row", NULL};
    Gradients *self = (Gradients *)object;
    Py_ssize_t fired_row = -1;
    int early;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p|n:begin", keywords, &early, &fired_row) ||
        (fired_row != -1 && check_index(fired_row, self->row_count, "fired_row") < 0)) {
        return NULL;
    }
    if (self->active) {
        PyErr_SetString(PyExc_RuntimeError, "begin(): a backward is active already");
        return NULL;
    }
    if (enter(self) < 0) {
        return NULL;
    }
    Py_ssize_t count = begin(self, early, fired_row);
    leave(self);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *
gradients_fired(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    return row < 0 ? NULL : PyBool_FromLong(self->fired[row]);
}

static PyObject *
gradients_fired_flags(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    return PyByteArray_FromStringAndSize((const char *)self->fired, (Py_ssize_t)self->row_count);
}

static PyObject *
gradients_unfired(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = parse_index(argument, self->bucket_count, "bucket");
    PyObject *list = index < 0 ? NULL : PyList_New(0);
    for (size_t k = 0; list != NULL && k < self->buckets[index].count; k++) {
        size_t row = self->buckets[index].rows[k];
        if (self->fired[row]) {
            continue;
        }
        PyObject *number = PyLong_FromSize_t(row);
        if (number == NULL || PyList_Append(list, number) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(number);
    }
    return list;
}

static PyObject *
gradients_pack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "out", "divisor", NULL};
    Gradients *self = (Gradients *)object;
    operation op;
    Py_ssize_t bucket;
    PyObject *out;
    double divisor;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOd:pack", keywords, &bucket, &out, &divisor) ||
        check_index(bucket, self->bucket_count, "bucket") < 0 || check_divisor(divisor) < 0 ||
        operation_begin(self, &op, bucket) < 0) {
        return NULL;
    }
    return operation_end(self, &op, pack(self, &op, out, divisor) < 0);
}

static PyObject *
gradients_stashed(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = parse_index(argument, self->bucket_count, "bucket");
    Py_ssize_t count = 0;
    if (index < 0) {
        return NULL;
    }
    for (size_t k = 0; k < self->buckets[index].count; k++) {
        count += self->stash[self->buckets[index].rows[k]] != NULL;
    }
    return PyLong_FromSsize_t(count);
}

static PyObject *
gradients_stash(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    if (row < 0) {
        return NULL;
    }
    return Py_NewRef(self->stash[row] != NULL ? self->stash[row] : Py_None);
}

static int
is_local(const Gradients *self, size_t row)
{
    return self->stash[row] != NULL && !self->synced[row];
}

static PyObject *
gradients_is_local(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    return row < 0 ? NULL : PyBool_FromLong(is_local(self, (size_t)row));
}

/* The caller finishes the row: abort() leaves its `.grad` alone from now on.  What the caller makes of it is `local` at the
 * next begin(), since nothing here knows what went into it; settle() can say more. */
static PyObject *
gradients_take_stash(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    if (row < 0 || enter(self) < 0) {
        return NULL;
    }
    PyObject *stash = self->stash[row];
    if (stash != NULL) {
        self->stash[row] = NULL;
        self->phase[row] = self->phase[row] == PHASE_ASIDE ? PHASE_KEPT : self->phase[row];
        Py_CLEAR(self->handed[row]);
    }
    leave(self);
    return stash != NULL ? stash : Py_NewRef(Py_None);
}

static PyObject *
gradients_contributes(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    const Gradients *self = (Gradients *)object;
    PyObject *flags = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->row_count);
    for (size_t row = 0; flags != NULL && row < self->row_count; row++) {
        PyBytes_AS_STRING(flags)[row] = self->fired[row] || is_local(self, row);
    }
    return flags;
}

static PyObject *
gradients_position(PyObject *object, PyObject *argument)
{
    const Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    return row < 0 ? NULL : PyLong_FromSize_t(self->position[row]);
}

/* used: a buffer of one byte a row, or None.  The caller releases `buffer` when buffer->obj is set. */
static int
parse_used(const Gradients *self, PyObject *used, Py_buffer *buffer)
{
    if (used == Py_None) {
        return 0;
    }
    if (PyObject_GetBuffer(used, buffer, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if ((size_t)buffer->len != self->row_count) {
        PyErr_Format(PyExc_ValueError, "used: expected %zu bytes, one a parameter, got %zd", self->row_count, buffer->len);
        return -1;
    }
    return 0;
}

static PyObject *
gradients_hand_over(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "reduced", "views", "divisor", "used", NULL};
    Gradients *self = (Gradients *)object;
    PyObject *reduced, *views, *used, *result = NULL;
    Py_ssize_t bucket;
    Py_buffer flags = {0};
    handover give = {0};
    operation op;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOOdO:hand_over", keywords, &bucket, &reduced, &views, &give.divisor,
                                     &used) ||
        check_index(bucket, self->bucket_count, "bucket") < 0 || check_divisor(give.divisor) < 0) {
        return NULL;
    }
    if (parse_views(&self->buckets[bucket], views, &give.views) == 0 && parse_used(self, used, &flags) == 0 &&
        operation_begin(self, &op, bucket) == 0) {
        give.used = flags.obj != NULL ? flags.buf : NULL;
        result = operation_end(self, &op, hand_over(self, &op, reduced, &give) < 0);
    }
    if (flags.obj != NULL) {
        PyBuffer_Release(&flags);
    }
    Py_XDECREF(give.views);
    return result;
}

static PyObject *
gradients_accumulate(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "views", NULL};
    Gradients *self = (Gradients *)object;
    PyObject *views, *fast = NULL, *result = NULL;
    Py_ssize_t bucket;
    operation op;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO:accumulate", keywords, &bucket, &views) ||
        check_index(bucket, self->bucket_count, "bucket") < 0) {
        return NULL;
    }
    if (parse_views(&self->buckets[bucket], views, &fast) == 0 && operation_begin(self, &op, bucket) == 0) {
        result = operation_end(self, &op, accumulate(self, &op, fast) < 0);
    }
    Py_XDECREF(fast);
    return result;
}

/* What finish_row() does, for a row whose gradient the caller has made. */
static int
settle(Gradients *self, size_t row, PyObject *grad, int synced)
{
    if (set_grad(self, row, grad) < 0) {
        return -1;
    }
    int kept = self->stash[row] != NULL && grad == self->stash[row];
    Py_XSETREF(self->handed[row], synced ? Py_XNewRef(grad) : NULL);
    self->phase[row] = self->phase[row] == PHASE_IDLE ? PHASE_IDLE : kept ? PHASE_KEPT : PHASE_FRESH;
    Py_CLEAR(self->stash[row]);
    return 0;
}

static PyObject *
gradients_settle(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"row", "grad", "synced", NULL};
    Gradients *self = (Gradients *)object;
    Py_ssize_t row;
    PyObject *grad;
    int synced;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOp:settle", keywords, &row, &grad, &synced) ||
        check_index(row, self->row_count, "row") < 0 || enter(self) < 0) {
        return NULL;
    }
    int result = settle(self, (size_t)row, grad != Py_None ? grad : NULL, synced);
    leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
gradients_end(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    end((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_reset(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    reset((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_abort(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    if (enter(self) < 0) {
        return NULL;
    }
    int result = abort_all(self);
    leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
gradients_set_launched(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = parse_index(argument, self->bucket_count, "bucket");
    if (index < 0) {
        return NULL;
    }
    self->buckets[index].launched = 1;
    Py_RETURN_NONE;
}

static PyObject *
gradients_set_names(PyObject *object, PyObject *names)
{
    Gradients *self = (Gradients *)object;
    PyObject *tuple = mp_names_new(names, self->row_count);
    if (tuple == NULL) {
        return NULL;
    }
    Py_SETREF(self->names, tuple);
    Py_RETURN_NONE;
}

static PyObject *
gradients_get_fires(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(((Gradients *)object)->fires);
}

static PyObject *
gradients_get_refired(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Gradients *)object)->refired);
}

static PyObject *
gradients_get_active(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Gradients *)object)->active);
}

/* ---- construction and destruction ------------------------------------------------------------------------------- */

/* Element counts through the exchange where a parameter can be read, else by asking it: a tensor that is always
 * returned to the caller needs no address. */
static int
take_param(Gradients *self, size_t row, PyObject *param)
{
    mp_view view;
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, param, &view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading it");
        return -1;
    }
    self->params[row] = Py_NewRef(param);
    if (result == MP_EXCHANGE_OK) {
        self->numels[row] = view.numel;
        if (use_device(self, &view, "a parameter") < 0) {
            mp_error_name(self->names, row, "another device");
            return -1;
        }
        return 0;
    }
    PyObject *numel = PyObject_CallMethod(param, "numel", NULL);
    self->numels[row] = numel != NULL ? PyLong_AsLongLong(numel) : -1;
    Py_XDECREF(numel);
    if (PyErr_Occurred()) {
        mp_error_name(self->names, row, "asking for its element count");
        return -1;
    }
    return 0;
}

static int
take_bucket_row(Gradients *self, size_t index, size_t position, PyObject *item)
{
    grad_bucket *bucket = &self->buckets[index];
    Py_ssize_t row = parse_index(item, self->row_count, "buckets: row");
    if (row < 0) {
        return -1;
    }
    if (self->bucket_of[row] != SIZE_MAX || position >= self->row_count) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': in more than one bucket", row_name(self, (size_t)row));
        return -1;
    }
    self->bucket_of[row] = index;
    self->position[row] = bucket->count;
    self->offsets[row] = bucket->numel;
    self->order[position] = (size_t)row;
    bucket->count++;
    bucket->numel += self->numels[row];
    return 0;
}

/* Rows in packing order.  *longest becomes the largest count. */
static int
take_buckets(Gradients *self, PyObject *buckets, size_t *longest)
{
    size_t position = 0;
    for (size_t index = 0; index < self->bucket_count; index++) {
        PyObject *rows = PySequence_Tuple(PyTuple_GET_ITEM(buckets, (Py_ssize_t)index));
        if (rows == NULL) {
            return -1;
        }
        int failed = 0;
        self->buckets[index].rows = self->order + position;
        for (Py_ssize_t k = 0; !failed && k < PyTuple_GET_SIZE(rows); k++) {
            failed = take_bucket_row(self, index, position, PyTuple_GET_ITEM(rows, k)) < 0;
            position++;
        }
        Py_DECREF(rows);
        if (failed) {
            return -1;
        }
        *longest = self->buckets[index].count > *longest ? self->buckets[index].count : *longest;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        if (self->bucket_of[row] == SIZE_MAX) {
            PyErr_Format(PyExc_ValueError, "parameter '%U': in no bucket", row_name(self, row));
            return -1;
        }
    }
    return 0;
}

static int
make_rows(Gradients *self, size_t count, size_t bucket_count)
{
    size_t some = count > 0 ? count : 1;
    self->params = PyMem_Calloc(some, sizeof *self->params);
    self->stash = PyMem_Calloc(some, sizeof *self->stash);
    self->handed = PyMem_Calloc(some, sizeof *self->handed);
    self->numels = PyMem_Calloc(some, sizeof *self->numels);
    self->offsets = PyMem_Calloc(some, sizeof *self->offsets);
    self->bucket_of = PyMem_Calloc(some, sizeof *self->bucket_of);
    self->position = PyMem_Calloc(some, sizeof *self->position);
    self->order = PyMem_Calloc(some, sizeof *self->order);
    self->synced = PyMem_Calloc(some, 1);
    self->phase = PyMem_Calloc(some, 1);
    self->fired = PyMem_Calloc(some, 1);
    self->buckets = PyMem_Calloc(bucket_count > 0 ? bucket_count : 1, sizeof *self->buckets);
    if (self->params == NULL || self->stash == NULL || self->handed == NULL || self->numels == NULL ||
        self->offsets == NULL || self->bucket_of == NULL || self->position == NULL || self->order == NULL || self->synced == NULL ||
        self->phase == NULL || self->fired == NULL || self->buckets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->bucket_of, 0xff, some * sizeof *self->bucket_of); /* SIZE_MAX: in no bucket yet */
    self->row_count = count;
    self->bucket_count = bucket_count;
    return 0;
}

static int
make_scratch(Gradients *self, size_t longest)
{
    size_t some = longest > 0 ? longest : 1;
    self->work = PyMem_Calloc(2 * some, sizeof *self->work);
    self->held = PyMem_Calloc(some, sizeof *self->held);
    self->result = PyMem_Calloc(some, sizeof *self->result);
    self->action = PyMem_Calloc(some, 1);
    if (self->work == NULL || self->held == NULL || self->result == NULL || self->action == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int
gradients_setup(Gradients *self, PyObject *params, PyObject *names, PyObject *buckets)
{
    size_t count = (size_t)PyTuple_GET_SIZE(params), longest = 0;
    self->names = mp_names_new(names, count);
    if (self->names == NULL || make_rows(self, count, (size_t)PyTuple_GET_SIZE(buckets)) < 0) {
        return -1;
    }
    for (size_t row = 0; row < count; row++) {
        if (take_param(self, row, PyTuple_GET_ITEM(params, (Py_ssize_t)row)) < 0) {
            return -1;
        }
    }
    if (take_buckets(self, buckets, &longest) < 0 || make_scratch(self, longest) < 0) {
        return -1;
    }
    reset(self);
    return 0;
}

static PyObject *
gradients_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"params", "names", "buckets", "on_first", "on_ready", NULL};
    PyObject *params, *names, *buckets, *on_first, *on_ready;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:Gradients", keywords, &params, &names, &buckets, &on_first,
                                     &on_ready)) {
        return NULL;
    }
    PyObject *param_tuple = PySequence_Tuple(params);
    PyObject *bucket_tuple = param_tuple != NULL ? PySequence_Tuple(buckets) : NULL;
    Gradients *self = bucket_tuple != NULL ? (Gradients *)type->tp_alloc(type, 0) : NULL;
    if (self == NULL) {
        goto done;
    }
    self->state = mp_state_of_type(type);
    self->on_first = Py_NewRef(on_first);
    self->on_ready = Py_NewRef(on_ready);
    mp_attr_init(&self->grad, self->state->str_grad);
    if (gradients_setup(self, param_tuple, names, bucket_tuple) < 0) {
        Py_CLEAR(self);
    }
done:
    Py_XDECREF(bucket_tuple);
    Py_XDECREF(param_tuple);
    return (PyObject *)self;
}

static int
gradients_traverse(PyObject *object, visitproc visit, void *arg)
{
    Gradients *self = (Gradients *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t row = 0; row < self->row_count; row++) {
        Py_VISIT(self->params[row]);
        Py_VISIT(self->stash[row]);
        Py_VISIT(self->handed[row]);
    }
    Py_VISIT(self->names);
    Py_VISIT(self->on_first);
    Py_VISIT(self->on_ready);
    return mp_attr_traverse(&self->grad, visit, arg);
}

/* Breaks cycles.  Counts of 0 make every operation that may still come a no-op or an IndexError. */
static int
gradients_clear(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    size_t count = self->row_count;
    self->active = 0;
    self->row_count = 0;
    Py_CLEAR(self->on_first);
    Py_CLEAR(self->on_ready);
    for (size_t row = 0; row < count; row++) {
        Py_CLEAR(self->params[row]);
        Py_CLEAR(self->stash[row]);
        Py_CLEAR(self->handed[row]);
    }
    for (size_t i = 0; i < self->bucket_count; i++) {
        if (self->backend != NULL) {
            self->backend->table_free(self->buckets[i].give_table);
            self->backend->table_free(self->buckets[i].pack_table);
        }
    }
    self->bucket_count = 0;
    mp_attr_clear(&self->grad);
    return 0;
}

static void
gradients_dealloc(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    (void)gradients_clear(object);
    Py_XDECREF(self->names);
    PyMem_Free(self->action);
    PyMem_Free(self->result);
    PyMem_Free(self->held);
    PyMem_Free(self->work);
    PyMem_Free(self->order);
    PyMem_Free(self->buckets);
    PyMem_Free(self->fired);
    PyMem_Free(self->phase);
    PyMem_Free(self->synced);
    PyMem_Free(self->position);
    PyMem_Free(self->bucket_of);
    PyMem_Free(self->offsets);
    PyMem_Free(self->numels);
    PyMem_Free(self->handed);
    PyMem_Free(self->stash);
    PyMem_Free(self->params);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef gradients_methods[] = {
    {"hook", gradients_hook, METH_O, "hook(row): a post-accumulate-grad hook for the row's parameter."},
    {"begin", MP_FUNCTION(gradients_begin), METH_VARARGS | METH_KEYWORDS,
     "begin(early): sets every .grad aside; returns how many there were."},
    {"fired", gradients_fired, METH_O, "fired(row): whether its hook fired since reset()."},
    {"fired_flags", gradients_fired_flags, METH_NOARGS, "One byte a row: 1 when its hook fired since reset()."},
    {"unfired", gradients_unfired, METH_O, "unfired(bucket): rows that have not fired since reset()."},
    {"pack", MP_FUNCTION(gradients_pack), METH_VARARGS | METH_KEYWORDS,
     "pack(bucket, out, divisor): out = (grad + local stash) / divisor; .grad = None.  Returns rows left to the caller."},
    {"stashed", gradients_stashed, METH_O, "stashed(bucket): how many of its rows have something set aside."},
    {"stash", gradients_stash, METH_O, "stash(row): what was set aside, or None."},
    {"take_stash", gradients_take_stash, METH_O, "take_stash(row): stash(row), given up to a caller that finishes the row."},
    {"is_local", gradients_is_local, METH_O, "is_local(row): whether what is set aside is not what hand_over() left."},
    {"contributes", gradients_contributes, METH_NOARGS,
     "One byte a row: 1 when it fired since reset() or something local is set aside for it."},
    {"position", gradients_position, METH_O, "position(row): the row's place in its bucket."},
    {"hand_over", MP_FUNCTION(gradients_hand_over), METH_VARARGS | METH_KEYWORDS,
     "hand_over(bucket, reduced, views, divisor, used): gives every row its reduced gradient.  Returns rows left to the "
     "caller."},
    {"accumulate", MP_FUNCTION(gradients_accumulate), METH_VARARGS | METH_KEYWORDS,
     "accumulate(bucket, views): adds .grad to what was set aside.  Returns rows left to the caller."},
    {"settle", MP_FUNCTION(gradients_settle), METH_VARARGS | METH_KEYWORDS,
     "settle(row, grad, synced): .grad = grad, for a row that was left to the caller; drops what was set aside."},
    {"end", gradients_end, METH_NOARGS, "The backward is over."},
    {"reset", gradients_reset, METH_NOARGS, "Forgets what fired and what was launched."},
    {"abort", gradients_abort, METH_NOARGS, "Puts back what begin() set aside; end() and reset()."},
    {"set_launched", gradients_set_launched, METH_O, "set_launched(bucket): a row that fires again raises RuntimeError."},
    {"set_names", gradients_set_names, METH_O, "set_names(names): names for messages."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef gradients_getset[] = {
    {"active", gradients_get_active, NULL, "Whether a backward is between begin() and end().", NULL},
    {"fires", gradients_get_fires, NULL, "Hooks that fired since begin().", NULL},
    {"refired", gradients_get_refired, NULL, "Whether some row fired more than once since reset().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef gradients_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Gradients, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot gradients_slots[] = {
    {Py_tp_new, gradients_new},
    {Py_tp_dealloc, gradients_dealloc},
    {Py_tp_traverse, gradients_traverse},
    {Py_tp_clear, gradients_clear},
    {Py_tp_methods, gradients_methods},
    {Py_tp_getset, gradients_getset},
    {Py_tp_members, gradients_members},
    {Py_tp_doc, "Readiness, packing and hand-over of the gradients of one device."},
    {0, NULL},
};

static PyType_Spec gradients_spec = {
    .name = "ddp_mp._C.Gradients",
    .basicsize = sizeof(Gradients),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = gradients_slots,
};

int
mp_gradients_init(PyObject *module, mp_state *state)
{
    state->gradients_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &gradients_spec, NULL);
    if (state->gradients_type == NULL || PyModule_AddType(module, state->gradients_type) < 0) {
        return -1;
    }
    state->fire_hook_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fire_hook_spec, NULL);
    return state->fire_hook_type == NULL ? -1 : 0;
}
