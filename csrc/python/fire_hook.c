/* What Gradients.hook() returns: a post-accumulate-grad hook that says that one parameter's gradient is there. */
#include "python/gradients.h"

#include <structmember.h>

/* Its parameter owns the hook, and Gradients owns the parameter; torch does not show the garbage collector a tensor's
 * hooks, so that a strong reference would be a cycle that nothing ever collects. */
typedef struct FireHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *gradients; /* owned weak reference */
    size_t row;
} FireHook;

/* A new reference, or NULL when there is none any more. */
static Gradients *
hook_owner(const FireHook *hook)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *owner = NULL;
    (void)PyWeakref_GetRef(hook->gradients, &owner); /* fails only for what is no weak reference */
    return (Gradients *)owner;
#else
    PyObject *owner = PyWeakref_GetObject(hook->gradients);
    return owner == Py_None ? NULL : (Gradients *)Py_NewRef(owner);
#endif
}

static PyObject *
fire_hook_call(PyObject *callable, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf),
               PyObject *Py_UNUSED(kwnames))
{
    size_t row = ((FireHook *)callable)->row;
    Gradients *gradients = hook_owner((FireHook *)callable);
    int result = gradients != NULL && gradients->row_count > 0 ? mp_gradients_fire(gradients, row) : 0;
    Py_XDECREF(gradients);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static void
fire_hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((FireHook *)object)->gradients);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef fire_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FireHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot fire_hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, fire_hook_dealloc},
    {Py_tp_members, fire_hook_members},
    {Py_tp_doc, "A post-accumulate-grad hook: the parameter's gradient is there."},
    {0, NULL},
};

static PyType_Spec fire_hook_spec = {
    .name = "ddp_mp._C.FireHook",
    .basicsize = sizeof(FireHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = fire_hook_slots,
};

PyObject *
mp_fire_hook_new(Gradients *gradients, size_t row)
{
    FireHook *hook = PyObject_New(FireHook, gradients->state->fire_hook_type);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = fire_hook_call;
    hook->row = row;
    hook->gradients = PyWeakref_NewRef((PyObject *)gradients, NULL);
    if (hook->gradients == NULL) {
        Py_CLEAR(hook);
    }
    return (PyObject *)hook;
}

int
mp_fire_hook_init(PyObject *module, mp_state *state)
{
    /* No name in the module: nobody makes one but a Gradients. */
    state->fire_hook_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fire_hook_spec, NULL);
    return state->fire_hook_type != NULL ? 0 : -1;
}
