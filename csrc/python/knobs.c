/* build_info(), and what tests and benchmarks set in the host backend (host/backend.h). */
#include "python/functions.h"

#include <pthread.h>
#include <string.h>

#include "cuda/backend.h"
#include "cuda/device.h"
#include "host/backend.h"
#include "host/convert.h"
#include "cuda/embedded.h"
#include "python/tensor.h"
#include "python/module.h"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

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

/* A new list of the names that run here, fastest first. */
static PyObject *
usable_isas(void)
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
        PyObject *usable = usable_isas();
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
                         "simd_available", usable_isas(),              /* */
                         "cuda_image",                                 /* */
                         "size", (Py_ssize_t)mp_cuda_image_size,       /* */
                         "note", mp_cuda_image_note,                   /* */
                         "source", (Py_ssize_t)strlen(mp_cuda_source), /* */
                         "cuda", cuda,                                 /* */
                         "cuda_driver", mp_cuda_driver_version());
}

static PyMethodDef functions[] = {
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"host_hold", host_hold, METH_O, host_hold_doc},
    {"simulate_cuda", simulate_cuda, METH_O, simulate_cuda_doc},
    {"host_set_inline_bytes", host_set_inline_bytes, METH_O, host_set_inline_bytes_doc},
    {"host_set_stream_bytes", host_set_stream_bytes, METH_O, host_set_stream_bytes_doc},
    {"host_set_isa", host_set_isa, METH_O, host_set_isa_doc},
    {"host_isa", host_isa, METH_NOARGS, host_isa_doc},
    {"host_fail_at", host_fail_at, METH_O, host_fail_at_doc},
    {NULL, NULL, 0, NULL},
};

int
mp_knobs_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
