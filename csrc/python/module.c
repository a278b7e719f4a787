/* The extension module: state, slots, errors.  Types and functions add themselves (module.h, functions.h). */
#include "python/module.h"

#include "python/functions.h"

mp_state *
mp_state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}

mp_state *
mp_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

PyTypeObject *
mp_type_add(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

PyObject *
mp_raise(mp_state *state, const mp_error *err)
{
    switch (err->status) {
    case MP_ERR_MEMORY:
        return PyErr_NoMemory();
    case MP_ERR_ARGUMENT:
        PyErr_SetString(PyExc_ValueError, err->text);
        return NULL;
    default:
        PyErr_SetString(state->device_error, err->text);
        return NULL;
    }
}

const mp_backend *
mp_backend_for(int device_type)
{
    switch (device_type) {
    case 1: /* kDLCPU */
        return &mp_backend_host;
    case 2: /* kDLCUDA */
    case 3: /* kDLCUDAHost: pinned memory that its owner reports as CUDA's */
        return &mp_backend_cuda;
    default:
        PyErr_Format(PyExc_ValueError, "no backend for DLPack device type %d: expected 1 (CPU) or 2 (CUDA)",
                     device_type);
        return NULL;
    }
}

PyDoc_STRVAR(device_error_doc,
             "A device or its driver reported an error; the text names the call, the code and the device.");

static int
add_device_error(PyObject *module, mp_state *state)
{
    state->device_error =
        PyErr_NewExceptionWithDoc("ddp_mp.DeviceError", device_error_doc, PyExc_RuntimeError, NULL);
    if (state->device_error == NULL) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "DeviceError", state->device_error);
}

static int
add_constants(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "UNCHANGED", 0) < 0 || PyModule_AddIntConstant(module, "MOVED", 1) < 0) {
        return -1;
    }
    if (PyModule_AddIntConstant(module, "REPLACED", 2) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "WRITTEN", 3);
}

/* The slot below does so only since Python 3.12, and only in interpreters that check it.  0, or -1 with ImportError. */
static int
require_main_interpreter(void)
{
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) {
        return 0;
    }
    PyErr_SetString(PyExc_ImportError, "ddp_mp._C cannot be used in a sub-interpreter: devices, streams and the cast thread "
                                       "belong to the whole process; import ddp_mp in the main interpreter");
    return -1;
}

static int
module_exec(PyObject *module)
{
    if (require_main_interpreter() < 0) {
        return -1;
    }
    mp_state *state = mp_state_of_module(module);
    state->str_data = PyUnicode_InternFromString("data");
    state->str_grad = PyUnicode_InternFromString("grad");
    state->str_version = PyUnicode_InternFromString("_version");
    state->str_requires_grad = PyUnicode_InternFromString("requires_grad");
    state->str_backward_hooks = PyUnicode_InternFromString("_backward_hooks");
    state->str_post_hooks = PyUnicode_InternFromString("_post_accumulate_grad_hooks");
    state->exchange = mp_exchange_new();
    if (state->str_data == NULL || state->str_grad == NULL || state->str_version == NULL ||
        state->str_requires_grad == NULL || state->str_backward_hooks == NULL || state->str_post_hooks == NULL ||
        state->exchange == NULL) {
        return -1;
    }
    if (add_device_error(module, state) < 0 || add_constants(module) < 0) {
        return -1;
    }
    if (mp_functions_init(module) < 0) {
        return -1;
    }
#ifdef DDP_MP_TESTING
    if (mp_testing_init(module) < 0) {
        return -1;
    }
#endif
    if (mp_event_init(module, state) < 0 || mp_engine_init(module, state) < 0 || mp_wait_hook_init(module, state) < 0) {
        return -1;
    }
    return mp_leaves_init(module, state) < 0 ? -1 : mp_gradients_init(module, state);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    mp_state *state = mp_state_of_module(module);
    Py_VISIT(state->event_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->wait_hook_type);
    Py_VISIT(state->gradient_hook_type);
    Py_VISIT(state->device_error);
    return state->exchange != NULL ? mp_exchange_traverse(state->exchange, visit, arg) : 0;
}

/* The exchange object itself stays until module_free: types of this module that outlive a clear may still ask it. */
static int
module_clear(PyObject *module)
{
    mp_state *state = mp_state_of_module(module);
    Py_CLEAR(state->event_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->wait_hook_type);
    Py_CLEAR(state->device_error);
    Py_CLEAR(state->str_data);
    Py_CLEAR(state->str_grad);
    Py_CLEAR(state->str_version);
    Py_CLEAR(state->str_requires_grad);
    Py_CLEAR(state->str_backward_hooks);
    Py_CLEAR(state->str_post_hooks);
    Py_CLEAR(state->gradient_hook_type);
    if (state->exchange != NULL) {
        mp_exchange_clear(state->exchange);
    }
    return 0;
}

static void
module_free(void *module)
{
    mp_state *state = mp_state_of_module(module);
    (void)module_clear(module);
    if (state->exchange != NULL) {
        mp_exchange_free(state->exchange);
        state->exchange = NULL;
    }
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* Devices, their streams and the worker thread belong to the process, and PyTorch cannot be imported twice. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    /* Backends lock what they share, but engines, gradients, deques and the exchange cache have no lock of their own: the
     * GIL is that lock.  "Not used" may be declared only when each of these objects carries one. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

PyDoc_STRVAR(module_doc, "The C half of ddp_mp.  Internal: the public names are those of the package.");

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ddp_mp._C",
    .m_doc = module_doc,
    .m_size = sizeof(mp_state),
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
