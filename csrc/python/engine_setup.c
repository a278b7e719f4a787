/* How an Engine comes to be: reads the parameters once, plans their buckets, makes events, notes the sites. */
#include "python/engine.h"

#include "python/planning.h"

/* Reads every parameter once: element counts for the planner, one device for all. */
static int
take_params(Engine *self, PyObject *params, PyObject *names, int64_t *numels)
{
    size_t count = (size_t)PyTuple_GET_SIZE(params);
    for (size_t row = 0; row < count; row++) {
        PyObject *param = PyTuple_GET_ITEM(params, (Py_ssize_t)row);
        mp_view view;
        if (mp_view_named(self->state->exchange, param, &view, names, row, "data") < 0) {
            return -1;
        }
        if (row == 0) {
            self->device_type = view.device_type;
            self->device_index = view.device_index;
        }
        if (!mp_view_same_device(&view, self->device_type, self->device_index)) {
            PyErr_Format(PyExc_ValueError,
                         "parameter '%U': on device (%d, %d), others on (%d, %d): one Engine a device",
                         mp_engine_name(self, row), view.device_type, view.device_index, self->device_type,
                         self->device_index);
            return -1;
        }
        if (view.dtype == MP_DTYPE_NONE) {
            char type[MP_TYPE_TEXT];
            PyErr_Format(PyExc_TypeError,
                         "parameter '%U': is %s, which is not cast: expected float64, float32, bfloat16 or float16",
                         mp_engine_name(self, row), mp_view_type(&view, type));
            return -1;
        }
        numels[row] = view.numel;
        self->params[row] = Py_NewRef(param);
        self->work[row].src = view.data;
        self->work[row].src_dtype = view.dtype;
        self->work[row].numel = view.numel;
        self->layout[row] = mp_view_layout_key(&view);
    }
    return 0;
}

static int
take_site(Engine *self, size_t index, PyObject *item)
{
    engine_site *site = &self->sites[index];
    PyObject *dict, *key;
    Py_ssize_t row;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "O!Un", &PyDict_Type, &dict, &key, &row)) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "sites[%zu]: expected (module._parameters, key, row)", index);
        }
        return -1;
    }
    if (row < 0 || (size_t)row >= self->row_count) {
        PyErr_Format(PyExc_IndexError, "sites[%zu]: row %zd: expected 0 to %zu", index, row, self->row_count - 1);
        return -1;
    }
    site->dict = Py_NewRef(dict);
    site->key = Py_NewRef(key);
    PyUnicode_InternInPlace(&site->key);
    site->row = (size_t)row;
    return 0;
}

static int
take_sites(Engine *self, PyObject *sites)
{
    PyObject *tuple = PySequence_Tuple(sites);
    if (tuple == NULL) {
        return -1;
    }
    int result = -1;
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    self->sites = PyMem_Calloc(count > 0 ? count : 1, sizeof *self->sites);
    if (self->sites == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    self->site_count = count;
    for (size_t i = 0; i < count; i++) {
        if (take_site(self, i, PyTuple_GET_ITEM(tuple, (Py_ssize_t)i)) < 0) {
            goto done;
        }
    }
    result = 0;
done:
    Py_DECREF(tuple);
    return result;
}

/* One event for every bucket that has bytes. */
static int
make_buckets(Engine *self)
{
    mp_error err;
    size_t count = self->plan.bucket_count;
    self->buckets = PyMem_Calloc(count, sizeof *self->buckets);
    self->arenas = PyMem_Calloc(count, sizeof *self->arenas);
    if (self->buckets == NULL || self->arenas == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->backend->open(self->device_index, &self->device, &err) != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    Py_ssize_t cover = -1;
    for (size_t i = 0; i < count; i++) {
        engine_bucket *bucket = &self->buckets[i];
        if (self->plan.buckets[i].bytes > 0) {
            if (self->backend->event_get(self->device, &bucket->event, &err) != MP_OK) {
                mp_raise(self->state, &err);
                return -1;
            }
            cover = (Py_ssize_t)i;
        }
        bucket->cover = cover;
    }
    return 0;
}

static int
make_rows(Engine *self, size_t count)
{
    self->params = PyMem_Calloc(count, sizeof *self->params);
    self->masters = PyMem_Calloc(count, sizeof *self->masters);
    self->lows = PyMem_Calloc(count, sizeof *self->lows);
    self->work = PyMem_Calloc(count, sizeof *self->work);
    self->layout = PyMem_Calloc(count, sizeof *self->layout);
    self->hints = PyMem_Calloc(count, sizeof *self->hints);
    self->is_low = PyMem_Calloc(count, 1);
    self->moved = PyMem_Calloc(count, 1);
    if (self->params == NULL || self->masters == NULL || self->lows == NULL || self->work == NULL ||
        self->layout == NULL || self->hints == NULL || self->is_low == NULL || self->moved == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->row_count = count;
    return 0;
}

int
mp_engine_setup(Engine *self, PyObject *params, PyObject *names, PyObject *sites, long long first_bytes, long long bytes)
{
    int result = -1;
    int64_t *numels = NULL;
    PyObject *tuple = PySequence_Tuple(params);
    if (tuple == NULL) {
        return -1;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError, "Engine: no parameters");
        goto done;
    }
    numels = PyMem_Calloc(count, sizeof *numels);
    if (numels == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    self->names = mp_names_new(names, count);
    if (self->names == NULL || make_rows(self, count) < 0 || take_params(self, tuple, self->names, numels) < 0 ||
        (self->backend = mp_backend_for(self->device_type)) == NULL ||
        mp_plan_make(&self->plan, numels, count, self->low, first_bytes, bytes) < 0 || make_buckets(self) < 0 ||
        take_sites(self, sites) < 0) {
        goto done;
    }
    result = 0;
done:
    PyMem_Free(numels);
    Py_DECREF(tuple);
    return result;
}
