/* Functions for tests and benchmarks alone.  setup.py adds this file to the extension when DDP_MP_DEVELOP=1 or
 * DDP_MP_TESTING=1 is set, as `make dev` does, and never otherwise: no wheel has these functions. */
#include "cuda/backend.h"
#include "cuda/device.h"
#include "host/backend.h"
#include "python/errors.h"
#include "python/functions.h"
#include "python/module.h"
#include "python/planning.h"

/* Borrowed tensor -> *out.  Needs every fact when `whole`, else those of the hot path.  0, or -1 with an exception. */
static int
read_tensor(mp_state *state, PyObject *tensor, const char *name, int whole, mp_view *out)
{
    const char *why = NULL;
    mp_exchange_result result = whole ? mp_exchange_view(state->exchange, tensor, out, &why)
                                      : mp_exchange_pointer(state->exchange, tensor, out, &why);
    if (result == MP_EXCHANGE_REFUSED) {
        PyErr_Format(PyExc_BufferError, "%s cannot be read: %s", name, why);
    }
    return result == MP_EXCHANGE_OK ? 0 : -1;
}

PyDoc_STRVAR(current_stream_doc,
             "current_stream(tensor)\n--\n\n"
             "The handle of the stream that PyTorch uses now on the tensor's device; 0: the default stream, or the host.");

static PyObject *
current_stream(PyObject *module, PyObject *tensor)
{
    mp_state *state = mp_state_of_module(module);
    mp_view view;
    void *stream;
    if (read_tensor(state, tensor, "tensor", 0, &view) < 0 ||
        mp_exchange_current_stream(state->exchange, tensor, view.device_type, view.device_index, &stream) < 0) {
        return NULL;
    }
    return PyLong_FromVoidPtr(stream);
}

/* --- cast and fuse --------------------------------------------------------------------------------------------- */

/* Rows of one device.  The tensors are the caller's to keep alive. */
typedef struct batch {
    mp_row *rows; /* owned */
    size_t count;
    PyObject *tensor; /* borrowed; any of them: lends the current stream.  NULL: no rows */
    int device_type;
    int device_index;
} batch;

/* Whether `view` can be the operand `name` of a row that writes `dst`.  0, or -1 with an exception. */
static int
check_operand(const char *name, const mp_view *view, const mp_view *dst)
{
    if (view->dtype == MP_DTYPE_NONE) {
        char type[MP_TYPE_TEXT];
        PyErr_Format(PyExc_TypeError, "%s: expected float64, float32, bfloat16 or float16, got %s", name,
                     mp_view_type(view, type));
        return -1;
    }
    if (view->layout != MP_LAYOUT_DENSE) {
        PyErr_Format(PyExc_ValueError, "%s: expected a dense tensor, got one with gaps or overlaps", name);
        return -1;
    }
    if (view->numel != dst->numel) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld elements, as dst has, got %lld", name,
                     (long long)dst->numel, (long long)view->numel);
        return -1;
    }
    /* Memory is converted in its own order; between equal shapes that is the elements' order only when strides agree. */
    if (mp_view_same_shape(view, dst) && !mp_view_same_layout(view, dst)) {
        PyErr_Format(PyExc_ValueError, "%s: expected the strides of dst", name);
        return -1;
    }
    if (!mp_view_same_device(view, dst->device_type, dst->device_index)) {
        PyErr_Format(PyExc_ValueError, "%s: expected the device of dst, (%d, %d), got (%d, %d)", name,
                     dst->device_type, dst->device_index, view->device_type, view->device_index);
        return -1;
    }
    return 0;
}

/* Reads an operand that may be None (then *data is NULL and *dtype float32).  0, or -1 with an exception. */
static int
read_operand(mp_state *state, PyObject *tensor, const char *name, const mp_view *dst, const void **data,
             mp_dtype *dtype)
{
    mp_view view;
    *data = NULL;
    *dtype = MP_F32;
    if (tensor == Py_None) {
        return 0;
    }
    if (read_tensor(state, tensor, name, 1, &view) < 0 || check_operand(name, &view, dst) < 0) {
        return -1;
    }
    *data = view.data;
    *dtype = view.dtype;
    return 0;
}

/* Appends a row; there is room.  src and add may be None. */
static int
add_row(mp_state *state, batch *rows, PyObject *src, PyObject *add, PyObject *dst)
{
    mp_view view;
    mp_row row;
    if (read_tensor(state, dst, "dst", 1, &view) < 0 || check_operand("dst", &view, &view) < 0 ||
        read_operand(state, src, "src", &view, &row.src, &row.src_dtype) < 0 ||
        read_operand(state, add, "add", &view, &row.add, &row.add_dtype) < 0) {
        return -1;
    }
    if (rows->tensor == NULL) {
        rows->tensor = dst;
        rows->device_type = view.device_type;
        rows->device_index = view.device_index;
    }
    else if (!mp_view_same_device(&view, rows->device_type, rows->device_index)) {
        PyErr_Format(PyExc_ValueError, "dst: expected one device for all, (%d, %d), got (%d, %d)", rows->device_type,
                     rows->device_index, view.device_type, view.device_index);
        return -1;
    }
    row.dst = view.data;
    row.numel = view.numel;
    row.dst_dtype = view.dtype;
    rows->rows[rows->count++] = row;
    return 0;
}

/* Launches on the private stream, between the caller's earlier and later work. */
static mp_status
launch_private(const mp_backend *backend, mp_device *device, const batch *rows, double divisor, void *stream,
               mp_error *err)
{
    mp_event *event = NULL;
    mp_status status;
    if ((status = backend->event_get(device, &event, err)) != MP_OK ||
        (status = backend->order_after(device, stream, err)) != MP_OK ||
        (status = backend->launch(device, rows->rows, rows->count, divisor, err)) != MP_OK ||
        (status = backend->event_record(event, err)) != MP_OK) {
        goto done;
    }
    status = backend->event_wait(event, stream, err);
done:
    backend->event_put(event);
    return status;
}

/* Runs without the GIL. */
static mp_status
launch_batch(const mp_backend *backend, const batch *rows, double divisor, void *stream, int on_private, mp_error *err)
{
    mp_device *device;
    const mp_status status = backend->open(rows->device_index, &device, err);
    if (status != MP_OK) {
        return status;
    }
    return on_private ? launch_private(backend, device, rows, divisor, stream, err)
                      : backend->launch_on(device, rows->rows, rows->count, divisor, stream, err);
}

/* 0, or -1 with an exception. */
static int
run_batch(mp_state *state, const batch *rows, double divisor, int on_private)
{
    if (rows->count == 0) {
        return 0;
    }
    const mp_backend *backend = mp_backend_for(rows->device_type);
    void *stream;
    if (backend == NULL || mp_exchange_current_stream(state->exchange, rows->tensor, rows->device_type,
                                                      rows->device_index, &stream) < 0) {
        return -1;
    }
    mp_error err;
    mp_status status;
    /* Always: opening a device, the private stream and a large row may all take their time. */
    Py_BEGIN_ALLOW_THREADS;
    status = launch_batch(backend, rows, divisor, stream, on_private, &err);
    Py_END_ALLOW_THREADS;
    if (status != MP_OK) {
        mp_raise(state, &err);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(cast_doc,
             "cast(src, dst)\n--\n\n"
             "dst[...] = src on the caller's stream.  Both dense, with equally many elements; tensors of different shapes are\n"
             "taken in memory order.");

static PyObject *
cast(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "cast() takes 2 arguments, src and dst, got %zd", count);
        return NULL;
    }
    mp_state *state = mp_state_of_module(module);
    mp_row row;
    batch rows = {.rows = &row};
    if (args[0] == Py_None) {
        PyErr_SetString(PyExc_TypeError, "src: expected a tensor, got None");
        return NULL;
    }
    if (add_row(state, &rows, args[0], Py_None, args[1]) < 0 || run_batch(state, &rows, 1.0, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The tuples are owned by the caller and of equal length. */
static int
fuse_tuples(mp_state *state, PyObject *src, PyObject *add, PyObject *dst, double divisor, int on_private)
{
    Py_ssize_t count = PyTuple_GET_SIZE(dst);
    batch rows = {.rows = PyMem_Calloc(count > 0 ? (size_t)count : 1, sizeof(mp_row))};
    int result = -1;
    if (rows.rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (add_row(state, &rows, PyTuple_GET_ITEM(src, i), PyTuple_GET_ITEM(add, i), PyTuple_GET_ITEM(dst, i)) < 0) {
            goto done;
        }
    }
    result = run_batch(state, &rows, divisor, on_private);
done:
    PyMem_Free(rows.rows);
    return result;
}

PyDoc_STRVAR(fuse_doc,
             "fuse(src, add, dst, divisor, private=False)\n--\n\n"
             "dst[i][...] = (src[i] + add[i]) / divisor for lists of tensors of one device, in one operation; None counts as\n"
             "zeros.  private: on the private stream, for which the caller's stream then waits.");

static PyObject *
fuse(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"src", "add", "dst", "divisor", "private", NULL};
    PyObject *given[3];
    /* Tuples of our own: they keep the tensors while the GIL is released, whatever happens to the lists. */
    PyObject *tuples[3] = {NULL, NULL, NULL};
    double divisor;
    int on_private = 0, result = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOd|p", names, &given[0], &given[1], &given[2], &divisor,
                                     &on_private)) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        tuples[i] = PySequence_Tuple(given[i]);
        if (tuples[i] == NULL) {
            goto done;
        }
        if (PyTuple_GET_SIZE(tuples[i]) != PyTuple_GET_SIZE(tuples[0])) {
            PyErr_Format(PyExc_ValueError, "%s: expected %zd tensors, as src has, got %zd", names[i],
                         PyTuple_GET_SIZE(tuples[0]), PyTuple_GET_SIZE(tuples[i]));
            goto done;
        }
    }
    result = fuse_tuples(mp_state_of_module(module), tuples[0], tuples[1], tuples[2], divisor, on_private);
done:
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(tuples[i]);
    }
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* --- without memory -------------------------------------------------------------------------------------------- */

/* A new array (PyMem_Free) of the integers of a tuple, or NULL with an exception. */
static int64_t *
element_counts(PyObject *tuple)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    int64_t *counts = PyMem_Calloc(count > 0 ? (size_t)count : 1, sizeof(int64_t));
    if (counts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        counts[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (counts[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(counts);
            return NULL;
        }
    }
    return counts;
}

PyDoc_STRVAR(plan_doc,
             "plan(numels, low_dtype, first_bucket_bytes, bucket_bytes)\n--\n\n"
             "The planner alone, no memory touched: {'buckets': [(first row, rows, bytes)], 'rows': [(bucket, offset)]}.");

static PyObject *
plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"numels", "low_dtype", "first_bucket_bytes", "bucket_bytes", NULL};
    PyObject *given, *numels = NULL, *result = NULL;
    const char *low_name;
    mp_dtype low;
    long long first_bytes, bytes;
    int64_t *counts = NULL;
    mp_plan built = {0};
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsLL", names, &given, &low_name, &first_bytes, &bytes) ||
        mp_plan_parse_low(low_name, &low) < 0 || (numels = PySequence_Tuple(given)) == NULL ||
        (counts = element_counts(numels)) == NULL ||
        mp_plan_make(&built, counts, (size_t)PyTuple_GET_SIZE(numels), low, first_bytes, bytes) < 0) {
        goto done;
    }
    result = Py_BuildValue("{sN sN}", "buckets", mp_plan_buckets(&built), "rows", mp_plan_rows(&built));
done:
    mp_plan_fini(&built);
    PyMem_Free(counts);
    Py_XDECREF(numels);
    return result;
}

/* --- settings of the backends ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(simulate_cuda_doc,
             "simulate_cuda(on)\n--\n\n"
             "For tests: CPU tensors count as memory of CUDA device 0.  RuntimeError unless the driver in this process is\n"
             "the simulated one of the tests.");

static PyObject *
simulate_cuda(PyObject *module, PyObject *arg)
{
    int on = PyObject_IsTrue(arg);
    if (on < 0) {
        return NULL;
    }
    if (on && !mp_cuda_is_simulated()) {
        PyErr_SetString(PyExc_RuntimeError, "simulate_cuda: the CUDA driver in this process is not the simulated one");
        return NULL;
    }
    mp_exchange_simulate(mp_state_of_module(module)->exchange, on ? mp_cuda_simulated_stream() : NULL);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(host_set_isa_doc,
             "host_set_isa(name)\n--\n\nThe instruction set of host casts by name; None: the fastest.");

static PyObject *
host_set_isa(PyObject *module, PyObject *arg)
{
    (void)module;
    const char *name = NULL;
    if (arg != Py_None && (name = PyUnicode_AsUTF8(arg)) == NULL) {
        return NULL;
    }
    if (mp_host_set_isa(name) < 0) {
        PyObject *usable = mp_usable_isas();
        if (usable != NULL) {
            PyErr_Format(PyExc_ValueError, "instruction set %R cannot run here: expected one of %R", arg, usable);
            Py_DECREF(usable);
        }
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(host_isa_doc, "host_isa()\n--\n\nThe instruction set that host casts use.");

static PyObject *
host_isa(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(mp_host_isa());
}

PyDoc_STRVAR(host_fail_at_doc,
             "host_fail_at(nth)\n--\n\n"
             "The nth fallible call of the host backend from now fails (0: none); returns the calls since the last time.");

static PyObject *
host_fail_at(PyObject *module, PyObject *arg)
{
    (void)module;
    unsigned long long nth = PyLong_AsUnsignedLongLong(arg);
    if (nth == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(mp_host_fail_at(nth));
}

static PyMethodDef functions[] = {
    {"current_stream", current_stream, METH_O, current_stream_doc},
    {"cast", MP_FUNCTION(cast), METH_FASTCALL, cast_doc},
    {"fuse", MP_FUNCTION(fuse), METH_VARARGS | METH_KEYWORDS, fuse_doc},
    {"plan", MP_FUNCTION(plan), METH_VARARGS | METH_KEYWORDS, plan_doc},
    {"simulate_cuda", simulate_cuda, METH_O, simulate_cuda_doc},
    {"host_set_isa", host_set_isa, METH_O, host_set_isa_doc},
    {"host_isa", host_isa, METH_NOARGS, host_isa_doc},
    {"host_fail_at", host_fail_at, METH_O, host_fail_at_doc},
    {NULL, NULL, 0, NULL},
};

int
mp_testing_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
