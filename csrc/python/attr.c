/* Finds a type's descriptor once and calls it directly.  attr.h says when that is the same as getattr and setattr. */
#include "python/attr.h"

void
mp_attr_init(mp_attr *attr, PyObject *name)
{
    attr->name = Py_NewRef(name);
}

static void
forget_type(mp_attr *attr)
{
    Py_CLEAR(attr->getter);
    Py_CLEAR(attr->setter);
    Py_CLEAR(attr->type);
}

void
mp_attr_clear(mp_attr *attr)
{
    forget_type(attr);
    Py_CLEAR(attr->name);
}

int
mp_attr_traverse(mp_attr *attr, visitproc visit, void *arg)
{
    Py_VISIT(attr->type);
    Py_VISIT(attr->getter);
    Py_VISIT(attr->setter);
    return 0;
}

int
mp_attr_optional(const PyObject *found)
{
    if (found != NULL) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Looks the descriptor up on the type.  One type is remembered: models hold one kind of parameter, nearly always. */
static int
learn_type(mp_attr *attr, PyTypeObject *type)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, attr->name);
    if (mp_attr_optional(found) < 0) { /* without one the generic calls raise, or find an instance attribute */
        return -1;
    }
    forget_type(attr);
    attr->type = (PyTypeObject *)Py_NewRef(type);
    if (found != NULL && Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        attr->getter = type->tp_getattro == PyObject_GenericGetAttr ? Py_NewRef(found) : NULL;
        attr->setter = type->tp_setattro == PyObject_GenericSetAttr ? Py_NewRef(found) : NULL;
    }
    Py_XDECREF(found);
    return 0;
}

PyObject *
mp_attr_get(mp_attr *attr, PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (type != attr->type && learn_type(attr, type) < 0) {
        return NULL;
    }
    PyObject *getter = attr->getter;
    if (getter == NULL) {
        return PyObject_GetAttr(object, attr->name);
    }
    return PyGetSetDescr_Type.tp_descr_get(getter, object, (PyObject *)type);
}

int
mp_attr_get_int64(mp_attr *attr, PyObject *object, int64_t *out)
{
    PyObject *value = mp_attr_get(attr, object);
    if (value == NULL) {
        return -1;
    }
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    *out = number;
    return 0;
}

int
mp_attr_set(mp_attr *attr, PyObject *object, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(object);
    if (type != attr->type && learn_type(attr, type) < 0) {
        return -1;
    }
    PyObject *setter = attr->setter;
    if (setter == NULL) {
        return PyObject_SetAttr(object, attr->name, value);
    }
    return PyGetSetDescr_Type.tp_descr_set(setter, object, value);
}
