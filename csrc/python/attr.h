/* One tensor attribute (`data`, `grad`, `_version`) read and written through its descriptor, found once a type.
 *
 * PyObject_SetAttr on a tensor walks the type's cache and checks instance dictionaries; torch's own getset descriptor
 * called directly does the same work without.  A type that intercepts attribute access (its own __getattribute__ or
 * __setattr__, a property in place of torch's descriptor) is served by the generic calls: what a subclass
 * overrides stays overridden.  Everything needs the GIL; get and set may run Python code of a subclass.
 */
#ifndef DDP_MP_ATTR_H
#define DDP_MP_ATTR_H

#include <Python.h>
#include <stdint.h>

typedef struct mp_attr {
    PyObject *name;     /* owned, interned */
    PyTypeObject *type; /* owned; the type that the two below belong to; NULL: none yet */
    PyObject *getter;   /* owned getset descriptor, or NULL: read through PyObject_GetAttr */
    PyObject *setter;   /* owned getset descriptor, or NULL: write through PyObject_SetAttr */
} mp_attr;

/* `attr` is zeroed memory.  Takes its own reference to `name`. */
void mp_attr_init(mp_attr *attr, PyObject *name);
void mp_attr_clear(mp_attr *attr);
int mp_attr_traverse(mp_attr *attr, visitproc visit, void *arg);

/* The value, a new reference, or NULL with an exception. */
PyObject *mp_attr_get(mp_attr *attr, PyObject *object);

/* After a look-up that may find nothing: 0 when something was found, and when AttributeError says that nothing was, which
 * is cleared; -1 with any other exception. */
int mp_attr_optional(const PyObject *found);

/* The value as an integer.  0, or -1 with an exception. */
int mp_attr_get_int64(mp_attr *attr, PyObject *object, int64_t *out);

/* 0, or -1 with an exception.  `value` is borrowed. */
int mp_attr_set(mp_attr *attr, PyObject *object, PyObject *value);

#endif
