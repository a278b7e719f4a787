/* Event: work recorded on a private cast stream, and the streams that can be made to wait for it.
 *
 * An event does not change once it is made, so its methods may let go of the GIL.
 */
#include "python/attr.h"
#include "core/dlpack_abi.h"
#include "python/functions.h"
#include "python/module.h"

typedef struct event_object {
    PyObject_HEAD
    const mp_backend *backend;
    mp_device *device; /* borrowed: devices are never freed */
    mp_event *event;   /* owned: given back to the pool in dealloc */
    PyObject *tensor;  /* owned; lends the current stream.  NULL only after tp_clear */
    int device_type;
    int device_index;
} event_object;

PyObject *
mp_event_wrap(mp_state *state, const mp_backend *backend, mp_device *device, mp_event *event, PyObject *tensor,
              int device_type, int device_index)
{
    event_object *self = PyObject_GC_New(event_object, state->event_type);
    if (self == NULL) {
        backend->event_put(event);
        return NULL;
    }
    self->backend = backend;
    self->device = device;
    self->event = event;
    self->tensor = Py_NewRef(tensor);
    self->device_type = device_type;
    self->device_index = device_index;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

static int
event_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((event_object *)object)->tensor);
    return 0;
}

static int
event_clear(PyObject *object)
{
    Py_CLEAR(((event_object *)object)->tensor);
    return 0;
}

static void
event_dealloc(PyObject *object)
{
    event_object *self = (event_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    self->backend->event_put(self->event);
    Py_CLEAR(self->tensor);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

/* PyTorch's current stream on the event's device. */
static int
current_stream(event_object *self, void **out)
{
    if (self->tensor == NULL) {
        PyErr_SetString(PyExc_ReferenceError, "the event was cleared by the garbage collector");
        return -1;
    }
    return mp_exchange_current_stream(mp_state_of_type(Py_TYPE(self))->exchange, self->tensor, self->device_type,
                                      self->device_index, out);
}

/* *value: a new reference to the attribute, NULL when there is none.  0, or -1 with an exception. */
static int
optional_attribute(PyObject *object, const char *name, PyObject **value)
{
    *value = PyObject_GetAttrString(object, name);
    return mp_attr_optional(*value);
}

/* A new reference to the int that names the stream to the driver, or NULL with an exception. */
static PyObject *
handle_of(PyObject *stream)
{
    /* Of torch.cuda.Stream and torch.Stream, in this order: both say what the driver calls the stream. */
    static const char *const names[] = {"cuda_stream", "native_handle"};
    PyObject *value;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (optional_attribute(stream, names[i], &value) < 0 || value != NULL) {
            return value;
        }
    }
    if (!PyIndex_Check(stream)) {
        PyErr_Format(PyExc_TypeError, "stream: expected a stream, its handle as int, or None, got %.200s",
                     Py_TYPE(stream)->tp_name);
        return NULL;
    }
    return PyNumber_Index(stream);
}

/* The caller's stream as the backend wants it.  0, or -1 with an exception. */
static int
resolve_stream(event_object *self, PyObject *stream, void **out)
{
    *out = NULL;
    /* On the host the calling thread is the stream, whatever object stands for it. */
    if (self->device_type == DL_CPU) {
        return 0;
    }
    if (stream == Py_None) {
        return current_stream(self, out);
    }
    PyObject *handle = handle_of(stream);
    if (handle == NULL) {
        return -1;
    }
    *out = PyLong_AsVoidPtr(handle);
    Py_DECREF(handle);
    return *out == NULL && PyErr_Occurred() ? -1 : 0;
}

/* --- methods ----------------------------------------------------------------------------------------------------- */

mp_status
mp_event_wait_on_host(const mp_backend *backend, mp_event *event, int *blocked, mp_error *err)
{
    int done = 0;
    mp_status status = backend->event_query(event, &done, err);
    *blocked = status == MP_OK && !done;
    if (!*blocked) {
        return status;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = backend->event_wait(event, NULL, err);
    Py_END_ALLOW_THREADS;
    return status;
}

/* A device is only told to wait; and it may not be asked first, as the host is, while a graph is captured. */
static mp_status
wait_on(event_object *self, void *stream, mp_error *err)
{
    int blocked;
    if (self->device_type == DL_CPU) {
        return mp_event_wait_on_host(self->backend, self->event, &blocked, err);
    }
    return self->backend->event_wait(self->event, stream, err);
}

/* The one argument of wait(), positional or as stream=, borrowed; NULL with TypeError. */
static PyObject *
stream_argument(PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    Py_ssize_t named = keywords != NULL ? PyTuple_GET_SIZE(keywords) : 0;
    if (count + named > 1) {
        PyErr_Format(PyExc_TypeError, "wait() takes at most 1 argument, got %zd", count + named);
        return NULL;
    }
    if (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0), "stream") != 0) {
        PyErr_Format(PyExc_TypeError, "wait() got an unexpected keyword argument '%U'", PyTuple_GET_ITEM(keywords, 0));
        return NULL;
    }
    return count + named == 1 ? args[0] : Py_None;
}

PyDoc_STRVAR(event_wait_doc,
             "wait($self, /, stream=None)\n--\n\n"
             "Makes a stream wait for the recorded work: a torch.cuda.Stream, a torch.Stream or a handle; None: PyTorch's\n"
             "current stream on the event's device.  On the host the calling thread waits and the argument is ignored.");

static PyObject *
event_wait(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    event_object *self = (event_object *)object;
    mp_error err;
    void *handle;
    PyObject *stream = stream_argument(args, count, keywords);
    if (stream == NULL || resolve_stream(self, stream, &handle) < 0) {
        return NULL;
    }
    if (wait_on(self, handle, &err) != MP_OK) {
        return mp_raise(mp_state_of_type(Py_TYPE(object)), &err);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(event_query_doc, "query($self, /)\n--\n\nWhether the recorded work is complete.");

static PyObject *
event_query(PyObject *object, PyObject *unused)
{
    event_object *self = (event_object *)object;
    mp_error err;
    int done = 0;
    (void)unused;
    if (self->backend->event_query(self->event, &done, &err) != MP_OK) {
        return mp_raise(mp_state_of_type(Py_TYPE(object)), &err);
    }
    return PyBool_FromLong(done);
}

PyDoc_STRVAR(event_synchronize_doc,
             "synchronize($self, /)\n--\n\nWaits on the calling thread until the recorded work is complete.");

static PyObject *
event_synchronize(PyObject *object, PyObject *unused)
{
    event_object *self = (event_object *)object;
    mp_error err;
    mp_status status;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    status = self->backend->event_synchronize(self->event, &err);
    Py_END_ALLOW_THREADS;
    if (status != MP_OK) {
        return mp_raise(mp_state_of_type(Py_TYPE(object)), &err);
    }
    Py_RETURN_NONE;
}

/* Nothing in the package asks for it: it is for code that orders streams of its own behind a cast. */
static PyObject *
event_native_handle(PyObject *object, void *unused)
{
    event_object *self = (event_object *)object;
    (void)unused;
    return PyLong_FromVoidPtr(self->backend->event_native(self->event));
}

static PyMethodDef event_methods[] = {
    {"wait", MP_FUNCTION(event_wait), METH_FASTCALL | METH_KEYWORDS, event_wait_doc},
    {"query", event_query, METH_NOARGS, event_query_doc},
    {"synchronize", event_synchronize, METH_NOARGS, event_synchronize_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_properties[] = {
    {"native_handle", event_native_handle, NULL, "The driver's handle of the event.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(event_doc, "Work recorded on a private cast stream.  Thread-safe.  Made by Engine.event().");

static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)event_doc},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_traverse, event_traverse},
    {Py_tp_clear, event_clear},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_properties},
    {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "ddp_mp._C.Event",
    .basicsize = sizeof(event_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = event_slots,
};

int
mp_event_init(PyObject *module, mp_state *state)
{
    state->event_type = mp_type_add(module, &event_spec);
    return state->event_type != NULL ? 0 : -1;
}
