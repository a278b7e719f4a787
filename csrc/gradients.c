/* The Gradients type: which gradients are ready, setting earlier ones aside, methods, garbage collection; and the hook.
 * See gradients.h for the whole. */
#include "gradients.h"

#include <math.h>
#include <string.h>
#include <structmember.h>

#include "functions.h"

/* Its parameter owns the hook, and Gradients owns the parameter; torch does not show the garbage collector a tensor's
 * hooks, so that a strong reference would be a cycle that nothing ever collects. */
typedef struct FireHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *gradients; /* owned weak reference */
    size_t row;
} FireHook;

int
mp_gradients_enter(Gradients *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this Gradients is in use: called from within one of its own operations, or from another "
                        "thread during one");
        return -1;
    }
    self->busy = 1;
    return 0;
}

void
mp_gradients_leave(Gradients *self)
{
    self->busy = 0;
}

int
mp_gradients_set(Gradients *self, size_t row, PyObject *value)
{
    if (mp_attr_set(&self->grad, self->params[row], value != NULL ? value : Py_None) < 0) {
        mp_error_name(self->names, row, value != NULL ? "setting its gradient" : "taking its gradient away");
        return -1;
    }
    return 0;
}

/* *out becomes the gradient, a new reference, or NULL when there is none.  0, or -1 with an exception. */
int
mp_gradients_get(Gradients *self, size_t row, PyObject **out)
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

int
mp_gradients_version(Gradients *self, size_t row, PyObject *gradient, int64_t *out)
{
    if (mp_attr_get_int64(&self->version, gradient, out) < 0) {
        mp_error_name(self->names, row, "reading the version counter of its gradient");
        return -1;
    }
    return 0;
}

/* The device comes with the first tensor that is seen; there is one for all. */
int
mp_gradients_use_device(Gradients *self, const mp_view *view, const char *what)
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

/* Also tells on_error. */
static void
raise_twice(const Gradients *self, size_t row)
{
    PyErr_Format(PyExc_RuntimeError,
                 "Expected to mark a variable ready only once. Parameter '%U' received a gradient after the bucket it "
                 "is in had been reduced, so that this gradient would be missing on the other ranks. Likely causes: "
                 "the parameter is used in several reentrant checkpoints; backward ran several times over one forward; or "
                 "a part of the loss was computed from the parameters before the forward, or inside "
                 "ddp_mp.full_precision(). Use checkpointing with use_reentrant=False; compute such a part after the "
                 "forward, or call backward on it by itself; or static_graph=True if the graph is the same in every "
                 "iteration.",
                 mp_gradients_name(self, row));
    if (self->on_error == Py_None) {
        return;
    }
    PyObject *error = mp_error_take();
    PyObject *result = PyObject_CallNoArgs(self->on_error);
    if (result == NULL) {
        PyErr_WriteUnraisable(self->on_error);
    }
    Py_XDECREF(result);
    mp_error_give(error);
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
    self->fired[row] = FIRED;
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

/* Where `grad` is what we left: whether somebody wrote into it since then. */
static int
look_for_writes(Gradients *self, size_t row, PyObject *grad)
{
    int64_t version = 0;
    if (grad == NULL || grad != self->left[row]) {
        return 0;
    }
    if (mp_gradients_version(self, row, grad, &version) < 0) {
        return -1;
    }
    if (version != self->left_version[row]) {
        self->left_version[row] = MP_WRITTEN;
    }
    return 0;
}

/* Reads every `.grad` into fresh[row], but that of `fired_row`, where it is this backward's already.  Refuses where
 * something from an earlier backward is still aside and `.grad` is empty: going on would lose it.  Where `.grad` has
 * been set since, that is what counts. */
static int
read_all(Gradients *self, PyObject **fresh, Py_ssize_t fired_row)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if (row + MP_GRADIENTS_AHEAD < self->row_count) {
            mp_gradients_prefetch(self, row + MP_GRADIENTS_AHEAD);
        }
        if ((Py_ssize_t)row != fired_row &&
            (mp_gradients_get(self, row, &fresh[row]) < 0 || look_for_writes(self, row, fresh[row]) < 0)) {
            return -1;
        }
        if (fresh[row] == NULL && self->stash[row] != NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "parameter '%U': the gradient that an earlier backward set aside was never given back: "
                         "abort() first",
                         mp_gradients_name(self, row));
            return -1;
        }
    }
    return 0;
}

static int
take_all(Gradients *self, PyObject **fresh)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if (fresh[row] == NULL || mp_gradients_set(self, row, NULL) == 0) {
            continue;
        }
        PyObject *error = mp_error_take();
        while (row-- > 0) {
            if (fresh[row] != NULL && mp_gradients_set(self, row, fresh[row]) < 0) {
                mp_error_collect(&error);
            }
        }
        return mp_error_finish(error);
    }
    return 0;
}

/* `grad`: stolen, or NULL.  What is not exactly what we left may differ between ranks: all of it is local then. */
static void
set_aside(Gradients *self, size_t row, PyObject *grad)
{
    int known = grad != NULL && grad == self->left[row];
    int written = known && self->left_version[row] == MP_WRITTEN;
    self->phase[row] = PHASE_ASIDE;
    self->known[row] = (uint8_t)known;
    self->local[row] = grad != NULL && (!known || written || self->left_own[row]);
    Py_XSETREF(self->stash[row], grad);
    if (!known) {
        Py_CLEAR(self->left[row]);
    }
    if (!known || written) {
        Py_CLEAR(self->base[row]);
    }
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
        set_aside(self, row, grad);
        count += grad != NULL;
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
        if (mp_gradients_set(self, row, self->stash[row]) < 0) {
            return -1;
        }
        Py_CLEAR(self->stash[row]);
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

/* The views in a tuple of our own, which nobody changes meanwhile (new reference), or *out = NULL for None. */
static int
parse_views(const grad_bucket *bucket, PyObject *views, PyObject **out)
{
    *out = NULL;
    if (views == Py_None) {
        return 0;
    }
    PyObject *tuple = PySequence_Tuple(views);
    if (tuple != NULL && (size_t)PyTuple_GET_SIZE(tuple) != bucket->count) {
        PyErr_Format(PyExc_ValueError, "views: expected %zu, one a row of the bucket, got %zd", bucket->count,
                     PyTuple_GET_SIZE(tuple));
        Py_CLEAR(tuple);
    }
    *out = tuple;
    return tuple != NULL ? 0 : -1;
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
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    Py_ssize_t count = begin(self, early, fired_row);
    mp_gradients_leave(self);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *
gradients_fired(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    return row < 0 ? NULL : PyBool_FromLong(self->fired[row] != NOT_FIRED);
}

static PyObject *
gradients_fired_flags(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    return PyByteArray_FromStringAndSize((const char *)self->fired, (Py_ssize_t)self->row_count);
}

/* 0, or -1 with an exception. */
static int
append_row(PyObject *list, size_t row)
{
    PyObject *number = PyLong_FromSize_t(row);
    int result = number != NULL ? PyList_Append(list, number) : -1;
    Py_XDECREF(number);
    return result;
}

static PyObject *
gradients_pack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "out", "divisor", NULL};
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket;
    PyObject *out;
    double divisor;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOd:pack", keywords, &bucket, &out, &divisor) ||
        check_index(bucket, self->bucket_count, "bucket") < 0 || check_divisor(divisor) < 0) {
        return NULL;
    }
    return mp_gradients_pack(self, (size_t)bucket, out, divisor);
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
    return self->stash[row] != NULL && self->local[row];
}

static PyObject *
gradients_is_local(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    return row < 0 ? NULL : PyBool_FromLong(is_local(self, (size_t)row));
}

/* Rows of a bucket that `wanted` says 1 for, as a list. */
static PyObject *
list_rows(Gradients *self, PyObject *bucket, int (*wanted)(const Gradients *self, size_t row))
{
    Py_ssize_t index = parse_index(bucket, self->bucket_count, "bucket");
    PyObject *list = index < 0 ? NULL : PyList_New(0);
    for (size_t k = 0; list != NULL && k < self->buckets[index].count; k++) {
        size_t row = self->buckets[index].rows[k];
        if (wanted(self, row) && append_row(list, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static int
has_not_fired(const Gradients *self, size_t row)
{
    return !self->fired[row];
}

static PyObject *
gradients_unfired(PyObject *object, PyObject *argument)
{
    return list_rows((Gradients *)object, argument, has_not_fired);
}

static int
lacks_base(const Gradients *self, size_t row)
{
    return self->fired[row] && self->stash[row] != NULL && !self->local[row];
}

static PyObject *
gradients_without_base(PyObject *object, PyObject *argument)
{
    return list_rows((Gradients *)object, argument, lacks_base);
}

static int
has_base(const Gradients *self, size_t row)
{
    return self->base[row] != NULL;
}

static PyObject *
gradients_with_base(PyObject *object, PyObject *argument)
{
    return list_rows((Gradients *)object, argument, has_base);
}

/* Gradients of a type that the parameter's masters do not have can be set while it is a copy, and not be given back. */
static PyObject *
gradients_of_other_type(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = parse_index(argument, self->bucket_count, "bucket");
    PyObject *list = index < 0 ? NULL : PyList_New(0);
    for (size_t k = 0; list != NULL && k < self->buckets[index].count; k++) {
        size_t row = self->buckets[index].rows[k];
        const char *why = NULL;
        mp_view view;
        if (self->stash[row] == NULL || self->known[row]) {
            continue;
        }
        mp_exchange_result result = mp_exchange_layout(self->state->exchange, self->stash[row], &view, &why);
        if (result == MP_EXCHANGE_ERROR) {
            mp_error_name(self->names, row, "reading the gradient set aside");
            Py_CLEAR(list);
        }
        else if (result == MP_EXCHANGE_OK && view.dtype != self->dtype[row] && append_row(list, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
gradients_set_stash(PyObject *object, PyObject *args)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row;
    PyObject *stash;
    if (!PyArg_ParseTuple(args, "nO:set_stash", &row, &stash) || check_index(row, self->row_count, "row") < 0) {
        return NULL;
    }
    if (self->stash[row] == NULL) {
        PyErr_Format(PyExc_RuntimeError, "parameter '%U': nothing is set aside", mp_gradients_name(self, (size_t)row));
        return NULL;
    }
    if (mp_gradients_enter(self) < 0) { /* an operation may have read the one that would go */
        return NULL;
    }
    Py_SETREF(self->stash[row], Py_NewRef(stash));
    mp_gradients_leave(self);
    Py_RETURN_NONE;
}

static PyObject *
gradients_base(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = parse_index(argument, self->row_count, "row");
    if (row < 0) {
        return NULL;
    }
    return Py_NewRef(self->base[row] != NULL ? self->base[row] : Py_None);
}

static PyObject *
gradients_set_base(PyObject *object, PyObject *args)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row;
    PyObject *base;
    if (!PyArg_ParseTuple(args, "nO:set_base", &row, &base) || check_index(row, self->row_count, "row") < 0) {
        return NULL;
    }
    if (self->stash[row] == NULL || (self->local[row] && base != Py_None)) {
        PyErr_Format(PyExc_RuntimeError, "parameter '%U': nothing that is equal on all ranks is set aside",
                     mp_gradients_name(self, (size_t)row));
        return NULL;
    }
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    Py_XSETREF(self->base[row], base != Py_None ? Py_NewRef(base) : NULL);
    self->local[row] = 1;
    mp_gradients_leave(self);
    Py_RETURN_NONE;
}

static PyObject *
gradients_contributes(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    const Gradients *self = (Gradients *)object;
    PyObject *flags = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->row_count);
    for (size_t row = 0; flags != NULL && row < self->row_count; row++) {
        PyBytes_AS_STRING(flags)[row] = (char)(is_local(self, row) ? FIRED : self->fired[row]);
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
        PyErr_Format(PyExc_ValueError, "used: expected %zu bytes, one a parameter, got %zd", self->row_count,
                     buffer->len);
        return -1;
    }
    return 0;
}

static PyObject *
gradients_hand_over(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "reduced", "views", "divisor", "used", NULL};
    Gradients *self = (Gradients *)object;
    PyObject *reduced, *views, *used, *tuple = NULL, *result = NULL;
    Py_ssize_t bucket;
    Py_buffer flags = {0};
    double divisor;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOOdO:hand_over", keywords, &bucket, &reduced, &views, &divisor,
                                     &used) ||
        check_index(bucket, self->bucket_count, "bucket") < 0 || check_divisor(divisor) < 0) {
        return NULL;
    }
    if (parse_views(&self->buckets[bucket], views, &tuple) == 0 && parse_used(self, used, &flags) == 0) {
        result = mp_gradients_hand_over(self, (size_t)bucket, reduced, tuple, divisor,
                                        flags.obj != NULL ? flags.buf : NULL);
    }
    if (flags.obj != NULL) {
        PyBuffer_Release(&flags);
    }
    Py_XDECREF(tuple);
    return result;
}

static PyObject *
gradients_accumulate(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"bucket", "views", NULL};
    Gradients *self = (Gradients *)object;
    PyObject *views, *tuple = NULL, *result = NULL;
    Py_ssize_t bucket;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO:accumulate", keywords, &bucket, &views) ||
        check_index(bucket, self->bucket_count, "bucket") < 0) {
        return NULL;
    }
    if (parse_views(&self->buckets[bucket], views, &tuple) == 0) {
        result = mp_gradients_accumulate(self, (size_t)bucket, tuple);
    }
    Py_XDECREF(tuple);
    return result;
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
        check_index(row, self->row_count, "row") < 0 || mp_gradients_enter(self) < 0) {
        return NULL;
    }
    int result = mp_gradients_settle(self, (size_t)row, grad != Py_None ? grad : NULL, synced);
    mp_gradients_leave(self);
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
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    int result = abort_all(self);
    mp_gradients_leave(self);
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
    self->hints[row] = mp_hint_of(param);
    self->dtype[row] = MP_DTYPE_NONE;
    if (result == MP_EXCHANGE_OK) {
        self->numels[row] = view.numel;
        self->dtype[row] = (int8_t)view.dtype;
        if (mp_gradients_use_device(self, &view, "a parameter") < 0) {
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
        PyErr_Format(PyExc_ValueError, "parameter '%U': in more than one bucket", mp_gradients_name(self, (size_t)row));
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
            PyErr_Format(PyExc_ValueError, "parameter '%U': in no bucket", mp_gradients_name(self, row));
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
    self->left = PyMem_Calloc(some, sizeof *self->left);
    self->left_version = PyMem_Calloc(some, sizeof *self->left_version);
    self->base = PyMem_Calloc(some, sizeof *self->base);
    self->hints = PyMem_Calloc(some, sizeof *self->hints);
    self->view_hints = PyMem_Calloc(some, sizeof *self->view_hints);
    self->views = PyMem_Calloc(some, sizeof *self->views);
    self->numels = PyMem_Calloc(some, sizeof *self->numels);
    self->offsets = PyMem_Calloc(some, sizeof *self->offsets);
    self->bucket_of = PyMem_Calloc(some, sizeof *self->bucket_of);
    self->position = PyMem_Calloc(some, sizeof *self->position);
    self->order = PyMem_Calloc(some, sizeof *self->order);
    self->left_own = PyMem_Calloc(some, 1);
    self->known = PyMem_Calloc(some, 1);
    self->local = PyMem_Calloc(some, 1);
    self->dtype = PyMem_Calloc(some, 1);
    self->phase = PyMem_Calloc(some, 1);
    self->fired = PyMem_Calloc(some, 1);
    self->buckets = PyMem_Calloc(bucket_count > 0 ? bucket_count : 1, sizeof *self->buckets);
    if (self->params == NULL || self->stash == NULL || self->left == NULL || self->left_version == NULL ||
        self->base == NULL || self->hints == NULL || self->view_hints == NULL || self->views == NULL ||
        self->numels == NULL || self->offsets == NULL || self->bucket_of == NULL || self->position == NULL ||
        self->order == NULL || self->left_own == NULL || self->known == NULL || self->local == NULL ||
        self->dtype == NULL || self->phase == NULL || self->fired == NULL || self->buckets == NULL) {
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
    static char *keywords[] = {"params", "names", "buckets", "on_first", "on_ready", "on_error", NULL};
    PyObject *params, *names, *buckets, *on_first, *on_ready, *on_error = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO|O:Gradients", keywords, &params, &names, &buckets, &on_first,
                                     &on_ready, &on_error)) {
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
    self->on_error = Py_NewRef(on_error);
    mp_attr_init(&self->grad, self->state->str_grad);
    mp_attr_init(&self->version, self->state->str_version);
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
        Py_VISIT(self->left[row]);
        Py_VISIT(self->base[row]);
    }
    Py_VISIT(self->names);
    Py_VISIT(self->on_first);
    Py_VISIT(self->on_ready);
    Py_VISIT(self->on_error);
    int stop = mp_attr_traverse(&self->version, visit, arg);
    return stop != 0 ? stop : mp_attr_traverse(&self->grad, visit, arg);
}

/* Gives back what is still aside: nobody else has it.  A gradient that was set since then stays. */
static void
gradients_finalize(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    PyObject *pending = PyErr_Occurred() ? mp_error_take() : NULL;
    for (size_t row = 0; row < self->row_count; row++) {
        PyObject *now = NULL;
        if (self->stash[row] == NULL) {
            continue;
        }
        if (mp_gradients_get(self, row, &now) < 0 ||
            ((now == NULL || self->active) && mp_gradients_set(self, row, self->stash[row]) < 0)) {
            PyErr_WriteUnraisable(object);
        }
        Py_XDECREF(now);
    }
    if (pending != NULL) {
        mp_error_give(pending);
    }
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
    Py_CLEAR(self->on_error);
    for (size_t row = 0; row < count; row++) {
        Py_CLEAR(self->params[row]);
        Py_CLEAR(self->stash[row]);
        Py_CLEAR(self->left[row]);
        Py_CLEAR(self->base[row]);
    }
    for (size_t i = 0; i < self->bucket_count; i++) {
        if (self->backend != NULL) {
            self->backend->table_free(self->buckets[i].give_table);
            self->backend->table_free(self->buckets[i].pack_table);
        }
    }
    self->bucket_count = 0;
    mp_attr_clear(&self->version);
    mp_attr_clear(&self->grad);
    return 0;
}

static void
gradients_dealloc(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (PyObject_CallFinalizerFromDealloc(object) < 0) {
        return; /* somebody took a new reference meanwhile */
    }
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
    PyMem_Free(self->dtype);
    PyMem_Free(self->local);
    PyMem_Free(self->known);
    PyMem_Free(self->left_own);
    PyMem_Free(self->position);
    PyMem_Free(self->bucket_of);
    PyMem_Free(self->offsets);
    PyMem_Free(self->numels);
    PyMem_Free(self->views);
    PyMem_Free(self->view_hints);
    PyMem_Free(self->hints);
    PyMem_Free(self->base);
    PyMem_Free(self->left_version);
    PyMem_Free(self->left);
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
    {"fired_flags", gradients_fired_flags, METH_NOARGS, "One byte a row: not 0 when its hook fired since reset()."},
    {"unfired", gradients_unfired, METH_O, "unfired(bucket): rows that have not fired since reset()."},
    {"pack", MP_FUNCTION(gradients_pack), METH_VARARGS | METH_KEYWORDS,
     "pack(bucket, out, divisor): out = (grad + local stash) / divisor; .grad = None.  Returns rows left to the "
     "caller."},
    {"stashed", gradients_stashed, METH_O, "stashed(bucket): how many of its rows have something set aside."},
    {"stash", gradients_stash, METH_O, "stash(row): what was set aside, or None."},
    {"is_local", gradients_is_local, METH_O, "is_local(row): whether what is set aside is not equal on all ranks."},
    {"without_base", gradients_without_base, METH_O,
     "without_base(bucket): rows that fired and whose stash is equal on all ranks."},
    {"of_other_type", gradients_of_other_type, METH_O,
     "of_other_type(bucket): rows whose stash is the user's and has another element type than the parameter had."},
    {"set_stash", gradients_set_stash, METH_VARARGS, "set_stash(row, tensor): takes the place of what was set aside."},
    {"with_base", gradients_with_base, METH_O, "with_base(bucket): rows that have a base."},
    {"base", gradients_base, METH_O, "base(row): what set_base() gave, or None."},
    {"set_base", gradients_set_base, METH_VARARGS,
     "set_base(row, tensor): a copy of the stash, before this rank adds to it.  None: all of the stash is local."},
    {"contributes", gradients_contributes, METH_NOARGS,
     "One byte a row: 1 when it fired since reset() or something local is set aside for it, 2 when it fired without "
     "a gradient."},
    {"position", gradients_position, METH_O, "position(row): the row's place in its bucket."},
    {"hand_over", MP_FUNCTION(gradients_hand_over), METH_VARARGS | METH_KEYWORDS,
     "hand_over(bucket, reduced, views, divisor, used): gives every row its reduced gradient.  Returns rows left to "
     "the caller."},
    {"accumulate", MP_FUNCTION(gradients_accumulate), METH_VARARGS | METH_KEYWORDS,
     "accumulate(bucket, views): adds .grad to what was set aside.  Returns rows left to the caller."},
    {"settle", MP_FUNCTION(gradients_settle), METH_VARARGS | METH_KEYWORDS,
     "settle(row, grad, synced): .grad = grad, for a row that was left to the caller; drops what was set aside."},
    {"end", gradients_end, METH_NOARGS, "The backward is over."},
    {"reset", gradients_reset, METH_NOARGS, "Forgets what fired and what was launched."},
    {"abort", gradients_abort, METH_NOARGS, "Puts back what begin() set aside; end() and reset()."},
    {"set_launched", gradients_set_launched, METH_O,
     "set_launched(bucket): a row that fires again raises RuntimeError."},
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
    {Py_tp_finalize, gradients_finalize},
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
