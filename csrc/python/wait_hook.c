/* What Engine.wait_hook() returns: a forward pre-hook that waits for the casts of one bucket and those before it. */
#include "python/engine.h"

#include <structmember.h>

typedef struct WaitHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Engine *engine; /* owned */
    Py_ssize_t bucket;
} WaitHook;

static PyObject *
wait_hook_call(PyObject *callable, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf),
               PyObject *Py_UNUSED(kwnames))
{
    WaitHook *self = (WaitHook *)callable;
    if (self->engine == NULL || self->engine->recorded < 0 || mp_engine_wait(self->engine, self->bucket) == 0) {
        Py_RETURN_NONE;
    }
    return NULL;
}

static int
wait_hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((WaitHook *)object)->engine);
    return 0;
}

static int
wait_hook_clear(PyObject *object)
{
    Py_CLEAR(((WaitHook *)object)->engine);
    return 0;
}

static void
wait_hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)wait_hook_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef wait_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(WaitHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot wait_hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, wait_hook_dealloc},
    {Py_tp_traverse, wait_hook_traverse},
    {Py_tp_clear, wait_hook_clear},
    {Py_tp_members, wait_hook_members},
    {Py_tp_doc, "A forward pre-hook: the current stream waits for the casts that the module reads."},
    {0, NULL},
};

static PyType_Spec wait_hook_spec = {
    .name = "ddp_mp._C.WaitHook",
    .basicsize = sizeof(WaitHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = wait_hook_slots,
};

PyObject *
mp_wait_hook_new(Engine *engine, Py_ssize_t bucket)
{
    WaitHook *hook = PyObject_GC_New(WaitHook, engine->state->wait_hook_type);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = wait_hook_call;
    hook->engine = (Engine *)Py_NewRef((PyObject *)engine);
    hook->bucket = bucket;
    PyObject_GC_Track(hook);
    return (PyObject *)hook;
}

int
mp_wait_hook_init(PyObject *module, mp_state *state)
{
    /* No name in the module: nobody makes one but an engine. */
    state->wait_hook_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &wait_hook_spec, NULL);
    return state->wait_hook_type != NULL ? 0 : -1;
}
