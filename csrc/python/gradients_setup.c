/* Construction of a Gradients: its arguments become rows in packing order.  See gradients.h for the whole. */
#include "python/gradients.h"

#include <string.h>

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
    Py_ssize_t row = mp_index_parse(item, self->row_count, "buckets: row");
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
    mp_gradients_reset(self);
    return 0;
}

PyObject *
mp_gradients_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
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
