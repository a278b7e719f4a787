/* EventDeque: a queue of events, one for every module.
 *
 * The GIL is the lock of these objects: no method calls into Python between reading and writing what it changes, and
 * references are dropped only when the object is whole again.
 */
#include "python/deque.h"
#include "python/module.h"

typedef struct deque_object {
    PyObject_HEAD
    mp_deque ring; /* of owned Event objects */
} deque_object;

static PyObject *
deque_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != 0 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0)) {
        PyErr_Format(PyExc_TypeError, "%.100s takes no arguments", type->tp_name);
        return NULL;
    }
    deque_object *self = PyObject_GC_New(deque_object, type);
    if (self == NULL) {
        return NULL;
    }
    mp_deque_init(&self->ring);
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int
deque_traverse(PyObject *object, visitproc visit, void *arg)
{
    deque_object *self = (deque_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->ring.length; i++) {
        Py_VISIT((PyObject *)mp_deque_at(&self->ring, i));
    }
    return 0;
}

/* Empties the object before it drops a reference: whoever comes back meanwhile finds a valid, empty deque. */
static int
deque_drop_all(PyObject *object)
{
    deque_object *self = (deque_object *)object;
    mp_deque old = self->ring;
    mp_deque_init(&self->ring);
    for (PyObject *item; (item = mp_deque_pop_left(&old)) != NULL;) {
        Py_DECREF(item);
    }
    mp_deque_fini(&old);
    return 0;
}

static void
deque_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)deque_drop_all(object);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyObject *
deque_add(PyObject *object, PyObject *item, int (*push)(mp_deque *, void *))
{
    if (!Py_IS_TYPE(item, mp_state_of_type(Py_TYPE(object))->event_type)) {
        PyErr_Format(PyExc_TypeError, "expected an Event, got %.200s", Py_TYPE(item)->tp_name);
        return NULL;
    }
    if (push(&((deque_object *)object)->ring, Py_NewRef(item)) < 0) {
        Py_DECREF(item);
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

/* The deque's reference becomes the caller's. */
static PyObject *
deque_take(PyObject *object, void *(*pop)(mp_deque *))
{
    PyObject *item = pop(&((deque_object *)object)->ring);
    if (item == NULL) {
        PyErr_SetString(PyExc_IndexError, "pop from an empty deque");
    }
    return item;
}

PyDoc_STRVAR(deque_append_doc, "append($self, event, /)\n--\n\nAdds an event at the right end.");

static PyObject *
deque_append(PyObject *object, PyObject *item)
{
    return deque_add(object, item, mp_deque_push);
}

/* Nothing in the package calls it: the queue stands where PyTorch has a collections.deque, and offers its four ends. */
PyDoc_STRVAR(deque_appendleft_doc, "appendleft($self, event, /)\n--\n\nAdds an event at the left end.");

static PyObject *
deque_appendleft(PyObject *object, PyObject *item)
{
    return deque_add(object, item, mp_deque_push_left);
}

PyDoc_STRVAR(deque_pop_doc, "pop($self, /)\n--\n\nRemoves the rightmost event and returns it; IndexError when empty.");

static PyObject *
deque_pop(PyObject *object, PyObject *unused)
{
    (void)unused;
    return deque_take(object, mp_deque_pop);
}

PyDoc_STRVAR(deque_popleft_doc,
             "popleft($self, /)\n--\n\nRemoves the leftmost event and returns it; IndexError when empty.");

static PyObject *
deque_popleft(PyObject *object, PyObject *unused)
{
    (void)unused;
    return deque_take(object, mp_deque_pop_left);
}

PyDoc_STRVAR(deque_clear_doc, "clear($self, /)\n--\n\nRemoves all events.");

static PyObject *
deque_clear(PyObject *object, PyObject *unused)
{
    (void)unused;
    (void)deque_drop_all(object);
    Py_RETURN_NONE;
}

static Py_ssize_t
deque_length(PyObject *object)
{
    return (Py_ssize_t)((deque_object *)object)->ring.length;
}

/* Python has added the length to a negative index. */
static PyObject *
deque_item(PyObject *object, Py_ssize_t index)
{
    deque_object *self = (deque_object *)object;
    if (index < 0 || (size_t)index >= self->ring.length) {
        PyErr_SetString(PyExc_IndexError, "deque index out of range");
        return NULL;
    }
    return Py_NewRef((PyObject *)mp_deque_at(&self->ring, (size_t)index));
}

/* A new list of the events. */
static PyObject *
deque_list(deque_object *self)
{
    PyObject *list = NULL;
    /* Making a list may run the garbage collector, and that any code: the length is looked at again. */
    do {
        Py_XDECREF(list);
        list = PyList_New((Py_ssize_t)self->ring.length);
        if (list == NULL) {
            return NULL;
        }
    } while ((size_t)PyList_GET_SIZE(list) != self->ring.length);
    for (size_t i = 0; i < self->ring.length; i++) {
        PyList_SET_ITEM(list, (Py_ssize_t)i, Py_NewRef((PyObject *)mp_deque_at(&self->ring, i)));
    }
    return list;
}

/* Iterates over the events of now: another thread may go on appending and popping. */
static PyObject *
deque_iter(PyObject *object)
{
    PyObject *list = deque_list((deque_object *)object);
    PyObject *iterator = list != NULL ? PyObject_GetIter(list) : NULL;
    Py_XDECREF(list);
    return iterator;
}

PyDoc_STRVAR(reduce_doc, "__reduce__($self, /)\n--\n\nA copy is empty: events belong to this process and this pass.");

static PyObject *
reduce_empty(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(O())", Py_TYPE(object));
}

static PyMethodDef deque_methods[] = {
    {"append", deque_append, METH_O, deque_append_doc},
    {"appendleft", deque_appendleft, METH_O, deque_appendleft_doc},
    {"pop", deque_pop, METH_NOARGS, deque_pop_doc},
    {"popleft", deque_popleft, METH_NOARGS, deque_popleft_doc},
    {"clear", deque_clear, METH_NOARGS, deque_clear_doc},
    {"__reduce__", reduce_empty, METH_NOARGS, reduce_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(deque_doc,
             "EventDeque()\n--\n\n"
             "A queue of events with collections.deque's ends.  Thread-safe at method level; an iterator goes over the events\n"
             "there were when it was made.");

static PyType_Slot deque_slots[] = {
    {Py_tp_doc, (void *)deque_doc},
    {Py_tp_new, deque_new},
    {Py_tp_dealloc, deque_dealloc},
    {Py_tp_traverse, deque_traverse},
    {Py_tp_clear, deque_drop_all},
    {Py_tp_methods, deque_methods},
    {Py_tp_iter, deque_iter},
    {Py_sq_length, deque_length},
    {Py_sq_item, deque_item},
    {0, NULL},
};

static PyType_Spec deque_spec = {
    .name = "ddp_mp._C.EventDeque",
    .basicsize = sizeof(deque_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = deque_slots,
};

int
mp_event_queue_init(PyObject *module, mp_state *state)
{
    state->deque_type = mp_type_add(module, &deque_spec);
    return state->deque_type != NULL ? 0 : -1;
}
