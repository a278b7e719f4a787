/* Gradients: who has fired, and what was there before a backward: set aside when it begins, put back when it fails.
 * See gradients.h for the whole. */
#include "python/gradients.h"

#include <string.h>

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

int
mp_gradients_fire(Gradients *self, size_t row)
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

/* Starts the next round of readiness. */
void
mp_gradients_reset(Gradients *self)
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
void
mp_gradients_end(Gradients *self)
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

Py_ssize_t
mp_gradients_begin(Gradients *self, int early, Py_ssize_t fired_row)
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

int
mp_gradients_abort(Gradients *self)
{
    PyObject *error = NULL;
    for (size_t row = 0; row < self->row_count; row++) {
        if (abort_row(self, row) < 0) {
            mp_error_collect(&error);
        }
    }
    mp_gradients_end(self);
    mp_gradients_reset(self);
    return mp_error_finish(error);
}
