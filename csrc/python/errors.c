/* Names in messages, errors that must not stop a loop, hints of what to prefetch.  python/errors.h says what each does. */
#include "python/errors.h"

PyObject *
mp_names_new(PyObject *names, size_t count)
{
    PyObject *tuple = PySequence_Tuple(names);
    if (tuple == NULL) {
        return NULL;
    }
    if ((size_t)PyTuple_GET_SIZE(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "names: expected %zu, one a parameter, got %zd", count, PyTuple_GET_SIZE(tuple));
        goto error;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (!PyUnicode_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_Format(PyExc_TypeError, "names[%zd]: expected str, got %.200s", i,
                         Py_TYPE(PyTuple_GET_ITEM(tuple, i))->tp_name);
            goto error;
        }
    }
    return tuple;
error:
    Py_DECREF(tuple);
    return NULL;
}

int
mp_index_check(Py_ssize_t index, size_t count, const char *what)
{
    if (index < 0 || (size_t)index >= count) {
        PyErr_Format(PyExc_IndexError, "%s %zd: expected 0 to %zd", what, index, (Py_ssize_t)count - 1);
        return -1;
    }
    return 0;
}

Py_ssize_t
mp_index_parse(PyObject *argument, size_t count, const char *what)
{
    Py_ssize_t index = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    if ((index == -1 && PyErr_Occurred()) || mp_index_check(index, count, what) < 0) {
        return -1;
    }
    return index;
}

int
mp_list_append_index(PyObject *list, size_t index)
{
    PyObject *number = PyLong_FromSize_t(index);
    int result = number != NULL ? PyList_Append(list, number) : -1;
    Py_XDECREF(number);
    return result;
}

PyObject *
mp_error_take(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

void
mp_error_give(PyObject *exception)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(exception);
#else
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(exception)), exception, PyException_GetTraceback(exception));
#endif
}

void
mp_error_collect(PyObject **first)
{
    if (*first == NULL) {
        *first = mp_error_take();
    }
    else {
        PyErr_Clear();
    }
}

int
mp_error_finish(PyObject *first)
{
    if (first == NULL) {
        return 0;
    }
    mp_error_give(first);
    return -1;
}

/* The type to raise in place of `exception`: a built-in one takes a text; an unknown one may not. */
static PyObject *
renamed_type(PyObject *exception)
{
    PyObject *const plain[] = {PyExc_RuntimeError, PyExc_TypeError, PyExc_ValueError, PyExc_BufferError,
                               PyExc_NotImplementedError, PyExc_AttributeError};
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        if ((PyObject *)Py_TYPE(exception) == plain[i]) {
            return plain[i];
        }
    }
    return PyExc_RuntimeError;
}

void
mp_error_name(PyObject *names, size_t row, const char *action)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return;
    }
    PyObject *cause = mp_error_take();
    PyErr_Format(renamed_type(cause), "parameter '%U': %s: %S", PyTuple_GET_ITEM(names, (Py_ssize_t)row), action,
                 cause);
    PyObject *renamed = mp_error_take();
    PyException_SetContext(renamed, Py_NewRef(cause));
    PyException_SetCause(renamed, cause);
    mp_error_give(renamed);
}

static int
refuse(mp_exchange_result result, PyObject *names, size_t row, const char *what, const char *why)
{
    if (result == MP_EXCHANGE_OK) {
        return 0;
    }
    if (result == MP_EXCHANGE_REFUSED) {
        PyErr_Format(PyExc_BufferError, "parameter '%U': the %s cannot be read: %s",
                     PyTuple_GET_ITEM(names, (Py_ssize_t)row), what, why != NULL ? why : "no reason given");
        return -1;
    }
    mp_error_name(names, row, what);
    return -1;
}

int
mp_view_named(mp_exchange *exchange, PyObject *tensor, mp_view *out, PyObject *names, size_t row, const char *what)
{
    const char *why = NULL;
    return refuse(mp_exchange_view(exchange, tensor, out, &why), names, row, what, why);
}

int
mp_pointer_named(mp_exchange *exchange, PyObject *tensor, mp_view *out, PyObject *names, size_t row, const char *what)
{
    const char *why = NULL;
    return refuse(mp_exchange_pointer(exchange, tensor, out, &why), names, row, what, why);
}

const char *
mp_hint_of(PyObject *object)
{
    PyObject *value = object != NULL ? PyObject_GetAttrString(object, "_cdata") : NULL;
    void *address = value != NULL ? PyLong_AsVoidPtr(value) : NULL;
    Py_XDECREF(value);
    PyErr_Clear();
    return address;
}
