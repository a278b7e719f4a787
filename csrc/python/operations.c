/* The module's functions: describe, unshared, build_info, and what `ddp_mp check` sets in the host backend. */
#include "python/functions.h"

#include <pthread.h>
#include <string.h>

#include "cuda/backend.h"
#include "cuda/device.h"
#include "cuda/embedded.h"
#include "host/backend.h"
#include "host/convert.h"
#include "python/module.h"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* A new tuple of int. */
static PyObject *
integers(const int64_t *values, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

PyDoc_STRVAR(describe_doc,
             "describe(tensor)\n--\n\n"
             "What the engine sees of a tensor: data, numel, dtype (name), dense, device_type, device_index, shape, strides.\n"
             "BufferError with the reason when the tensor cannot be read.");

static PyObject *
describe(PyObject *module, PyObject *tensor)
{
    mp_view view;
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(mp_state_of_module(module)->exchange, tensor, &view, &why);
    if (result == MP_EXCHANGE_REFUSED) {
        PyErr_Format(PyExc_BufferError, "tensor cannot be read: %s", why);
    }
    if (result != MP_EXCHANGE_OK) {
        return NULL;
    }
    return Py_BuildValue("{sN sL ss sN si si sN sN}",                                         /* */
                         "data", PyLong_FromVoidPtr(view.data),                               /* */
                         "numel", (long long)view.numel,                                      /* */
                         "dtype", mp_dtype_name(view.dtype),                                  /* */
                         "dense", PyBool_FromLong(view.layout == MP_LAYOUT_DENSE),            /* */
                         "device_type", view.device_type, "device_index", view.device_index, /* */
                         "shape", integers(view.shape, view.ndim),                            /* */
                         "strides", integers(view.strides, view.ndim));
}

PyDoc_STRVAR(unshared_doc,
             "unshared(tensors, references=1)\n--\n\n"
             "Whether nothing but `references` owners, the list or tuple among them, holds each of these objects.");

static PyObject *
unshared(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensors", "references", NULL};
    PyObject *tensors;
    Py_ssize_t references = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|n", names, &tensors, &references)) {
        return NULL;
    }
    /* Nothing else: turning another sequence into a list would add owners. */
    if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) {
        PyErr_Format(PyExc_TypeError, "tensors: expected a list or tuple, got %.200s", Py_TYPE(tensors)->tp_name);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); i++) {
        if (Py_REFCNT(PySequence_Fast_GET_ITEM(tensors, i)) > references) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

PyObject *
mp_usable_isas(void)
{
    PyObject *names = PyList_New(0);
    if (names == NULL) {
        return NULL;
    }
    for (const mp_cast_isa *const *isa = mp_cast_all(); *isa != NULL; isa++) {
        if (!(*isa)->usable()) {
            continue;
        }
        PyObject *name = PyUnicode_FromString((*isa)->name);
        if (name == NULL || PyList_Append(names, name) < 0) {
            Py_XDECREF(name);
            Py_DECREF(names);
            return NULL;
        }
        Py_DECREF(name);
    }
    return names;
}

PyDoc_STRVAR(build_info_doc,
             "build_info()\n--\n\nHow the extension was built and what it uses.  Makes no driver call.");

static PyObject *
build_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef NDEBUG
    int debug = 0;
#else
    int debug = 1;
#endif
    char cuda[256];
    mp_cuda_status(cuda, sizeof(cuda));
    return Py_BuildValue("{ss ss ss sN ss sN s{sn ss sn} ss si}",      /* */
                         "version", MP_VERSION,                        /* */
                         "python", PY_VERSION,                         /* */
                         "compiler", COMPILER,                         /* */
                         "debug", PyBool_FromLong(debug),              /* */
                         "simd", mp_host_isa(),                        /* */
                         "simd_available", mp_usable_isas(),              /* */
                         "cuda_image",                                 /* */
                         "size", (Py_ssize_t)mp_cuda_image_size,       /* */
                         "note", mp_cuda_image_note,                   /* */
                         "source", (Py_ssize_t)strlen(mp_cuda_source), /* */
                         "cuda", cuda,                                 /* */
                         "cuda_driver", mp_cuda_driver_version());
}

/* --- for `ddp_mp check` ---------------------------------------------------------------------------------------------- */

/* What host_hold() holds: one for the process, as the worker thread that waits at it is. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int held;
} gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0};

/* Runs on the worker, without the GIL. */
static void
wait_at_gate(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&gate.lock);
    while (gate.held) {
        pthread_cond_wait(&gate.changed, &gate.lock);
    }
    pthread_mutex_unlock(&gate.lock);
}

PyDoc_STRVAR(host_hold_doc, "host_hold(held)\n--\n\nWhile held, the host stream's worker runs nothing.");

static PyObject *
host_hold(PyObject *module, PyObject *arg)
{
    (void)module;
    int held = PyObject_IsTrue(arg);
    if (held < 0) {
        return NULL;
    }
    pthread_mutex_lock(&gate.lock);
    gate.held = held;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
    mp_host_set_probe(held ? wait_at_gate : NULL, NULL);
    Py_RETURN_NONE;
}

/* Sets a size of the host backend.  The previous one, or NULL with an exception. */
static PyObject *
set_size(PyObject *arg, size_t (*set)(size_t bytes))
{
    size_t bytes = PyLong_AsSize_t(arg);
    if (bytes == (size_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromSize_t(set(bytes));
}

PyDoc_STRVAR(host_set_inline_bytes_doc,
             "host_set_inline_bytes(n)\n--\n\n"
             "Bytes up to which a launch runs on the calling thread when the worker is idle; returns the previous value.");

static PyObject *
host_set_inline_bytes(PyObject *module, PyObject *arg)
{
    (void)module;
    return set_size(arg, mp_host_set_inline_bytes);
}

PyDoc_STRVAR(host_set_stream_bytes_doc,
             "host_set_stream_bytes(n)\n--\n\n"
             "Arena bytes from which non-temporal stores are used; returns the previous value.");

static PyObject *
host_set_stream_bytes(PyObject *module, PyObject *arg)
{
    (void)module;
    return set_size(arg, mp_host_set_stream_bytes);
}

static PyMethodDef functions[] = {
    {"describe", describe, METH_O, describe_doc},
    {"unshared", MP_FUNCTION(unshared), METH_VARARGS | METH_KEYWORDS, unshared_doc},
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"host_hold", host_hold, METH_O, host_hold_doc},
    {"host_set_inline_bytes", host_set_inline_bytes, METH_O, host_set_inline_bytes_doc},
    {"host_set_stream_bytes", host_set_stream_bytes, METH_O, host_set_stream_bytes_doc},
    {NULL, NULL, 0, NULL},
};

int
mp_functions_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
