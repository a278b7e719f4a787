/* What the extension's files share: module state, the types' specs, and error helpers.  One state a module object; no
 * mutable globals. */
#ifndef DDP_MP_MODULE_H
#define DDP_MP_MODULE_H

#include <Python.h>

#include "core/backend.h"
#include "python/tensor.h"

typedef struct mp_state {
    PyTypeObject *event_type;      /* Event */
    PyTypeObject *engine_type;     /* Engine */
    PyTypeObject *wait_hook_type;  /* what Engine.wait_hook returns */
    PyTypeObject *gradient_hook_type; /* what Gradients.hook returns */
    PyObject *device_error;        /* DeviceError */
    PyObject *str_data;            /* interned "data" */
    PyObject *str_grad;            /* interned "grad" */
    PyObject *str_version;         /* interned "_version" */
    PyObject *str_requires_grad;   /* interned "requires_grad" */
    PyObject *str_backward_hooks;  /* interned "_backward_hooks" */
    PyObject *str_post_hooks;      /* interned "_post_accumulate_grad_hooks" */
    mp_exchange *exchange;
} mp_state;

/* The state of the module that defines `type`; never NULL for our own types. */
mp_state *mp_state_of_type(PyTypeObject *type);
mp_state *mp_state_of_module(PyObject *module);

/* Each file that defines types adds them to the module and the state.  0, or -1 with an exception. */
int mp_event_init(PyObject *module, mp_state *state);       /* event.c: Event */
int mp_engine_init(PyObject *module, mp_state *state);      /* engine.c: Engine */
int mp_wait_hook_init(PyObject *module, mp_state *state);   /* wait_hook.c: what Engine.wait_hook returns */
int mp_leaves_init(PyObject *module, mp_state *state);      /* leaves.c: Leaves */
int mp_gradients_init(PyObject *module, mp_state *state);   /* gradients.c: Gradients, and what its hook() returns */

/* Makes a type and adds it to the module under its own name.  A new reference, or NULL with an exception. */
PyTypeObject *mp_type_add(PyObject *module, PyType_Spec *spec);

/* Sets the Python exception that fits the status (MemoryError, DeviceError, ...).  Always returns NULL. */
PyObject *mp_raise(mp_state *state, const mp_error *err);

/* A new Event over a backend event that it takes over (gives back to the pool at the end), or NULL with an exception, the
 * event then given back.  `tensor` is any tensor of the device: it lends the current stream. */
PyObject *mp_event_wrap(mp_state *state, const mp_backend *backend, mp_device *device, mp_event *event, PyObject *tensor,
                        int device_type, int device_index);

/* event.c: blocks until the event of the host backend is complete.  The GIL is given up only if it is not complete yet, and
 * then *blocked is set: with another thread waiting for the GIL, giving it up wakes that thread. */
mp_status mp_event_wait_on_host(const mp_backend *backend, mp_event *event, int *blocked, mp_error *err);

/* The backend of a DLPack device type, or NULL with ValueError: 1 host, 2 and 3 CUDA. */
const mp_backend *mp_backend_for(int device_type);

#endif
