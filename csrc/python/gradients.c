/* The Gradients type: methods and what they are given, garbage collection.  See gradients.h for the whole. */
#include "python/gradients.h"

#include <math.h>
#include <structmember.h>

#include "python/functions.h"

/* ---- methods ---------------------------------------------------------------------------------------------------- */

static int
check_divisor(double divisor)
{
    if (!isfinite(divisor) || divisor == 0.0) {
        PyObject *found = PyFloat_FromDouble(divisor);
        if (found != NULL) {
            PyErr_Format(PyExc_ValueError, "divisor: expected a finite number other than 0, got %R", found);
            Py_DECREF(found);
        }
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
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
    return row < 0 ? NULL : mp_fire_hook_new(self, (size_t)row);
}

static PyObject *
gradients_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"early", "fired_row", NULL};
    Gradients *self = (Gradients *)object;
    Py_ssize_t fired_row = -1;
    int early;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p|n:begin", keywords, &early, &fired_row) ||
        (fired_row != -1 && mp_index_check(fired_row, self->row_count, "fired_row") < 0)) {
        return NULL;
    }
    if (self->active) {
        PyErr_SetString(PyExc_RuntimeError, "begin(): a backward is active already");
        return NULL;
    }
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    Py_ssize_t count = mp_gradients_begin(self, early, fired_row);
    mp_gradients_leave(self);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *
gradients_fired_flags(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    return PyByteArray_FromStringAndSize((const char *)self->fired, (Py_ssize_t)self->row_count);
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
        mp_index_check(bucket, self->bucket_count, "bucket") < 0 || check_divisor(divisor) < 0) {
        return NULL;
    }
    return mp_gradients_pack(self, (size_t)bucket, out, divisor);
}

static PyObject *
gradients_stashed(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = mp_index_parse(argument, self->bucket_count, "bucket");
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
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
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

static int
reduces_stash(const Gradients *self, size_t row)
{
    return self->stash[row] != NULL && mp_gradients_reduces_stash(self, row);
}

/* What `question` says of a row, as a bool. */
static PyObject *
ask_row(PyObject *object, PyObject *argument, int (*question)(const Gradients *self, size_t row))
{
    const Gradients *self = (Gradients *)object;
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
    return row < 0 ? NULL : PyBool_FromLong(question(self, (size_t)row));
}

static PyObject *
gradients_is_local(PyObject *object, PyObject *argument)
{
    return ask_row(object, argument, is_local);
}

static PyObject *
gradients_reduces_stash(PyObject *object, PyObject *argument)
{
    return ask_row(object, argument, reduces_stash);
}

static PyObject *
gradients_reduce_whole(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket = mp_index_parse(argument, self->bucket_count, "bucket");
    if (bucket < 0) {
        return NULL;
    }
    self->buckets[bucket].whole = 1;
    Py_RETURN_NONE;
}

/* Rows of a bucket that `wanted` says 1 for, as a list. */
static PyObject *
list_rows(Gradients *self, PyObject *bucket, int (*wanted)(const Gradients *self, size_t row))
{
    Py_ssize_t index = mp_index_parse(bucket, self->bucket_count, "bucket");
    PyObject *list = index < 0 ? NULL : PyList_New(0);
    for (size_t k = 0; list != NULL && k < self->buckets[index].count; k++) {
        size_t row = self->buckets[index].rows[k];
        if (wanted(self, row) && mp_list_append_index(list, row) < 0) {
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
    return self->fired[row] && self->stash[row] != NULL && !mp_gradients_reduces_stash(self, row);
}

static PyObject *
gradients_without_base(PyObject *object, PyObject *argument)
{
    return list_rows((Gradients *)object, argument, lacks_base);
}

/* Gradients of a type that the parameter's masters do not have can be set while it is a copy, and not be given back. */
static PyObject *
gradients_of_other_type(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = mp_index_parse(argument, self->bucket_count, "bucket");
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
        else if (result == MP_EXCHANGE_OK && view.dtype != self->dtype[row] && mp_list_append_index(list, row) < 0) {
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
    if (!PyArg_ParseTuple(args, "nO:set_stash", &row, &stash) || mp_index_check(row, self->row_count, "row") < 0) {
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
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
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
    if (!PyArg_ParseTuple(args, "nO:set_base", &row, &base) || mp_index_check(row, self->row_count, "row") < 0) {
        return NULL;
    }
    if (self->stash[row] == NULL || self->local[row]) {
        PyErr_Format(PyExc_RuntimeError, "parameter '%U': nothing that is equal on all ranks is set aside",
                     mp_gradients_name(self, (size_t)row));
        return NULL;
    }
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    Py_XSETREF(self->base[row], Py_NewRef(base));
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
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
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
        mp_index_check(bucket, self->bucket_count, "bucket") < 0 || check_divisor(divisor) < 0) {
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
        mp_index_check(bucket, self->bucket_count, "bucket") < 0) {
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
        mp_index_check(row, self->row_count, "row") < 0 || mp_gradients_enter(self) < 0) {
        return NULL;
    }
    int result = mp_gradients_settle(self, (size_t)row, grad != Py_None ? grad : NULL, synced);
    mp_gradients_leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
gradients_end(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    mp_gradients_end((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_reset(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    mp_gradients_reset((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_abort(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    if (mp_gradients_enter(self) < 0) {
        return NULL;
    }
    int result = mp_gradients_abort(self);
    mp_gradients_leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
gradients_set_launched(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t index = mp_index_parse(argument, self->bucket_count, "bucket");
    if (index < 0) {
        return NULL;
    }
    self->buckets[index].launched = 1;
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

/* ---- destruction ------------------------------------------------------------------------------------------------- */

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
    {"fired_flags", gradients_fired_flags, METH_NOARGS, "One byte a row: not 0 when its hook fired since reset()."},
    {"unfired", gradients_unfired, METH_O, "unfired(bucket): rows that have not fired since reset()."},
    {"pack", MP_FUNCTION(gradients_pack), METH_VARARGS | METH_KEYWORDS,
     "pack(bucket, out, divisor): out = (grad + local stash) / divisor; .grad = None.  Returns rows left to the "
     "caller."},
    {"stashed", gradients_stashed, METH_O, "stashed(bucket): how many of its rows have something set aside."},
    {"stash", gradients_stash, METH_O, "stash(row): what was set aside, or None."},
    {"is_local", gradients_is_local, METH_O, "is_local(row): whether what is set aside is not equal on all ranks."},
    {"reduces_stash", gradients_reduces_stash, METH_O,
     "reduces_stash(row): whether what is set aside takes part in the reduction."},
    {"reduce_whole", gradients_reduce_whole, METH_O,
     "reduce_whole(bucket): all that is set aside takes part in the reduction, from now on."},
    {"without_base", gradients_without_base, METH_O,
     "without_base(bucket): rows that fired and whose stash is equal on all ranks, and is not reduced again."},
    {"of_other_type", gradients_of_other_type, METH_O,
     "of_other_type(bucket): rows whose stash is the user's and has another element type than the parameter had."},
    {"set_stash", gradients_set_stash, METH_VARARGS, "set_stash(row, tensor): takes the place of what was set aside."},
    {"base", gradients_base, METH_O, "base(row): what set_base() gave, or None."},
    {"set_base", gradients_set_base, METH_VARARGS,
     "set_base(row, tensor): a copy of the stash, before this rank adds to it."},
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
    {Py_tp_new, mp_gradients_new},
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
    state->gradients_type = mp_type_add(module, &gradients_spec);
    return state->gradients_type != NULL ? 0 : -1;
}
