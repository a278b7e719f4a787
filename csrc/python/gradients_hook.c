/* The post-accumulate-grad hook of leaves and masters, and what becomes of a gradient that arrives. */
#include "python/gradients.h"

#include <structmember.h>

/* Its tensor owns the hook, and Gradients owns masters; torch does not show the garbage collector a tensor's hooks, so
 * that a strong reference would be a cycle that nothing ever collects. */
typedef struct GradientHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *owner; /* owned weak reference */
    size_t row;
} GradientHook;

/* ---- firing ----------------------------------------------------------------------------------------------------- */

/* Tells on_error that a callback failed; the exception stays the one that is set.  Always -1. */
static int
report(Gradients *self)
{
    PyObject *error = mp_error_take();
    PyObject *result = PyObject_CallNoArgs(self->on_error);
    if (result == NULL) {
        PyErr_Clear(); /* the first error is the one to be told */
    }
    Py_XDECREF(result);
    mp_error_give(error);
    return -1;
}

/* Calls a callback with a row or bucket, and one more argument that may be NULL (borrowed).  0, or -1 with an exception. */
static int
call(Gradients *self, PyObject *callback, size_t index, PyObject *more)
{
    PyObject *number = PyLong_FromSize_t(index);
    if (number == NULL) {
        return report(self);
    }
    PyObject *args[] = {number, more};
    PyObject *result = PyObject_Vectorcall(callback, args, more != NULL ? 2 : 1, NULL);
    Py_DECREF(number);
    if (result == NULL) {
        return report(self);
    }
    Py_DECREF(result);
    return 0;
}

/* How many entries a tensor's dictionary of hooks has; 0 for None.  -1 with an exception. */
static Py_ssize_t
hooks_of(mp_attr *attr, PyObject *tensor)
{
    PyObject *hooks = mp_attr_get(attr, tensor);
    if (hooks == NULL) {
        return -1;
    }
    Py_ssize_t count = hooks == Py_None ? 0 : PyObject_Size(hooks);
    Py_DECREF(hooks);
    return count;
}

/* Whether the user has hooks on the master, beside ours after accumulation.  -1 with an exception. */
static int
has_hooks(Gradients *self, PyObject *master)
{
    Py_ssize_t count = hooks_of(&self->tensor_hooks, master);
    if (count == 0) {
        count = hooks_of(&self->post_hooks, master);
        return count < 0 ? -1 : count > 1;
    }
    return count < 0 ? -1 : 1;
}

/* After an error: the leaf has no gradient, so that the next backward does not add to it.  Always -1. */
static int
drop_gradient(Gradients *self, PyObject *leaf)
{
    PyObject *error = mp_error_take();
    if (leaf != NULL && mp_attr_set(&self->grad, leaf, Py_None) < 0) {
        PyErr_Clear(); /* the first error is the one to be told */
    }
    mp_error_give(error);
    return -1;
}

/* A gradient is on a leaf.  0, or -1 with an exception. */
static int
fire_leaf(Gradients *self, size_t index, PyObject *leaf)
{
    grad_row *row = &self->rows[index];
    int special = row->leaf != NULL && row->leaf != leaf;
    if (!special) {
        special = has_hooks(self, row->master);
        if (special < 0) {
            mp_error_name(self->names, index, "looking for its hooks");
            return report(self);
        }
    }
    if (special) {
        row->special = 1;
        if (call(self, self->on_special, index, leaf) < 0) {
            drop_gradient(self, row->leaf);
            return -1;
        }
    }
    Py_XSETREF(row->leaf, Py_NewRef(leaf));
    return 0;
}

/* Whether the master takes gradients now; a leaf's gradient is dropped where not.  -1 with an exception. */
static int
is_trained(Gradients *self, grad_row *row, PyObject *tensor)
{
    PyObject *asked = mp_attr_get(&self->requires_grad, row->master);
    Py_XDECREF(asked);
    if (asked == Py_False && tensor != row->master) {
        return mp_attr_set(&self->grad, tensor, Py_None) < 0 ? -1 : 0;
    }
    return asked == NULL ? -1 : asked != Py_False;
}

static int
fired_late(Gradients *self, size_t index)
{
    PyErr_Format(PyExc_RuntimeError,
                 "Expected to mark a variable ready only once. Parameter '%U' received a gradient after the bucket it is in "
                 "had been reduced, so that this gradient would be missing on the other ranks. Likely causes: the parameter "
                 "is used in several reentrant checkpoints that were not used before; backward ran several times over one "
                 "forward; or a part of the loss was computed from the parameters before the forward. Use checkpointing with "
                 "use_reentrant=False; call backward on such a part by itself, or compute it after the forward; or "
                 "static_graph=True if the graph is the same in every iteration.",
                 mp_gradients_name(self, index));
    return report(self);
}

static int
arrive(Gradients *self, size_t index, PyObject *tensor)
{
    grad_row *row = &self->rows[index];
    int is_leaf = tensor != row->master;
    if (!self->active) {
        PyObject *elsewhere = !is_leaf && row->cast ? Py_True : Py_False;
        if (call(self, self->on_first, index, elsewhere) < 0) {
            return -1;
        }
        if (!self->active) {
            return 0;
        }
    }
    int trained = is_trained(self, row, tensor);
    if (trained <= 0) {
        if (trained < 0) {
            mp_error_name(self->names, index, "asking whether it requires grad");
            report(self);
        }
        return trained;
    }
    bucket_state *bucket = &self->buckets[row->bucket];
    if (bucket->launched) {
        return fired_late(self, index);
    }
    uint8_t kind = is_leaf ? FIRED_LEAF : FIRED_MASTER;
    self->fires++;
    self->refired |= is_leaf ? row->leaf == tensor || (row->fired_now & FIRED_MASTER) != 0 : row->fired_now != 0;
    self->direct |= !is_leaf && row->cast;
    row->fired_now |= kind;
    if (is_leaf && fire_leaf(self, index, tensor) < 0) {
        return -1;
    }
    row->fired = 1;
    if (!row->counted && (is_leaf || !row->cast)) {
        row->counted = 1;
        bucket->pending--;
        if (bucket->pending == 0 && self->early) {
            return call(self, self->on_ready, row->bucket, NULL);
        }
    }
    return 0;
}

/* A gradient was accumulated on `tensor`, the row's master or a leaf of it.  0, or -1 with an exception. */
static int
fire(Gradients *self, size_t index, PyObject *tensor)
{
    int result = arrive(self, index, tensor);
    return result < 0 && tensor != self->rows[index].master ? drop_gradient(self, tensor) : result;
}

/* ---- the hook --------------------------------------------------------------------------------------------------- */

/* A new reference, or NULL when there is none any more. */
static Gradients *
owner_of(const GradientHook *hook)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *owner = NULL;
    (void)PyWeakref_GetRef(hook->owner, &owner); /* fails only for what is no weak reference */
    return (Gradients *)owner;
#else
    PyObject *owner = PyWeakref_GetObject(hook->owner);
    return owner == Py_None ? NULL : (Gradients *)Py_NewRef(owner);
#endif
}

static PyObject *
hook_call(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const GradientHook *hook = (GradientHook *)callable;
    if (PyVectorcall_NARGS(nargsf) != 1 || kwnames != NULL) {
        PyErr_SetString(PyExc_TypeError, "a gradient hook is called with the tensor that accumulated");
        return NULL;
    }
    Gradients *owner = owner_of(hook);
    int result = owner != NULL && owner->row_count > 0 ? fire(owner, hook->row, args[0]) : 0;
    Py_XDECREF(owner);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static void
hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((GradientHook *)object)->owner);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(GradientHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_members, hook_members},
    {Py_tp_doc, "A post-accumulate-grad hook of a master or a leaf: its gradient is there."},
    {0, NULL},
};

static PyType_Spec hook_spec = {
    .name = "ddp_mp._C.GradientHook",
    .basicsize = sizeof(GradientHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = hook_slots,
};

PyObject *
mp_gradient_hook_new(Gradients *self, size_t row)
{
    GradientHook *hook = PyObject_New(GradientHook, self->state->gradient_hook_type);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = hook_call;
    hook->row = row;
    hook->owner = PyWeakref_NewRef((PyObject *)self, NULL);
    if (hook->owner == NULL) {
        Py_CLEAR(hook);
    }
    return (PyObject *)hook;
}

int
mp_gradient_hook_init(PyObject *module, mp_state *state)
{
    state->gradient_hook_type = mp_type_add(module, &hook_spec);
    return state->gradient_hook_type != NULL ? 0 : -1;
}
