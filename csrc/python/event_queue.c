/* EventDeque and EventTable: queues of events, and a queue for every module.
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

typedef struct table_object {
    PyObject_HEAD
    PyObject *pairs; /* owned dict: address of the key -> (key, deque).  The key in the pair keeps its address taken */
} table_object;

/* --- EventDeque -------------------------------------------------------------------------------------------------- */

/* A new, empty deque, or NULL with an exception. */
static PyObject *
deque_make(PyTypeObject *type)
{
    deque_object *self = PyObject_GC_New(deque_object, type);
    if (self == NULL) {
        return NULL;
    }
    mp_deque_init(&self->ring);
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* For types that take no arguments.  0, or -1 with TypeError. */
static int
no_arguments(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) != 0 || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0)) {
        PyErr_Format(PyExc_TypeError, "%.100s takes no arguments", type->tp_name);
        return -1;
    }
    return 0;
}

static PyObject *
deque_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return no_arguments(type, args, kwargs) < 0 ? NULL : deque_make(type);
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

/* --- EventTable -------------------------------------------------------------------------------------------------- */

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (no_arguments(type, args, kwargs) < 0) {
        return NULL;
    }
    PyObject *pairs = PyDict_New();
    table_object *self = pairs != NULL ? PyObject_GC_New(table_object, type) : NULL;
    if (self == NULL) {
        Py_XDECREF(pairs);
        return NULL;
    }
    self->pairs = pairs;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int
table_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((table_object *)object)->pairs);
    return 0;
}

/* The dict stays, empty: methods never see a table without one. */
static int
table_drop_all(PyObject *object)
{
    PyDict_Clear(((table_object *)object)->pairs);
    return 0;
}

static void
table_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((table_object *)object)->pairs);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* Adds an empty deque for a key that has none.  The deque, borrowed from the table, or NULL with an exception. */
static PyObject *
table_add(table_object *self, PyObject *key, PyObject *address)
{
    PyObject *pair = NULL, *added = NULL;
    PyObject *deque = deque_make(mp_state_of_type(Py_TYPE(self))->deque_type);
    if (deque == NULL || (pair = PyTuple_Pack(2, key, deque)) == NULL) {
        goto done;
    }
    /* Allocating may have run the garbage collector and so a finaliser that asked for the same key: the first stays. */
    PyObject *kept = PyDict_SetDefault(self->pairs, address, pair);
    added = kept != NULL ? PyTuple_GET_ITEM(kept, 1) : NULL;
done:
    Py_XDECREF(pair);
    Py_XDECREF(deque);
    return added;
}

static PyObject *
table_subscript(PyObject *object, PyObject *key)
{
    table_object *self = (table_object *)object;
    PyObject *address = PyLong_FromVoidPtr(key);
    if (address == NULL) {
        return NULL;
    }
    PyObject *pair = PyDict_GetItemWithError(self->pairs, address);
    PyObject *deque = NULL;
    if (pair != NULL) {
        deque = PyTuple_GET_ITEM(pair, 1);
    }
    else if (!PyErr_Occurred()) {
        deque = table_add(self, key, address);
    }
    Py_XINCREF(deque);
    Py_DECREF(address);
    return deque;
}

static int
table_contains(PyObject *object, PyObject *key)
{
    PyObject *address = PyLong_FromVoidPtr(key);
    if (address == NULL) {
        return -1;
    }
    int found = PyDict_Contains(((table_object *)object)->pairs, address);
    Py_DECREF(address);
    return found;
}

static Py_ssize_t
table_length(PyObject *object)
{
    return PyDict_GET_SIZE(((table_object *)object)->pairs);
}

PyDoc_STRVAR(table_clear_doc, "clear($self, /)\n--\n\nForgets all keys and their deques.");

static PyObject *
table_clear(PyObject *object, PyObject *unused)
{
    (void)unused;
    (void)table_drop_all(object);
    Py_RETURN_NONE;
}

static PyMethodDef table_methods[] = {
    {"clear", table_clear, METH_NOARGS, table_clear_doc},
    {"__reduce__", reduce_empty, METH_NOARGS, reduce_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(table_doc,
             "EventTable()\n--\n\n"
             "Module -> EventDeque, by identity and holding the module.  A missing key is created, as defaultdict(deque) does.");

static PyType_Slot table_slots[] = {
    {Py_tp_doc, (void *)table_doc},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_drop_all},
    {Py_tp_methods, table_methods},
    {Py_mp_subscript, table_subscript},
    {Py_mp_length, table_length},
    {Py_sq_contains, table_contains},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "ddp_mp._C.EventTable",
    .basicsize = sizeof(table_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = table_slots,
};

int
mp_event_queue_init(PyObject *module, mp_state *state)
{
    state->deque_type = mp_type_add(module, &deque_spec);
    state->table_type = state->deque_type != NULL ? mp_type_add(module, &table_spec) : NULL;
    return state->table_type != NULL ? 0 : -1;
}
