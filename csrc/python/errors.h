/* What the types that work on lists of named parameters share: names in messages, errors that must not stop a loop,
 * hints of what to prefetch.  Everything needs the GIL. */
#ifndef DDP_MP_PYUTIL_H
#define DDP_MP_PYUTIL_H

#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#include "python/tensor.h"

/* Host work on more bytes than this runs without the GIL: below, giving it up and taking it again costs more than the
 * work (64 KiB are converted in about 1 us). */
#define MP_GIL_BYTES (64 * 1024)

#define MP_DEVICE_TYPE_HOST 1 /* kDLCPU */

/* A new tuple of `count` str, or NULL with TypeError or ValueError. */
PyObject *mp_names_new(PyObject *names, size_t count);

/* 0 when `index` counts one of `count` things, else -1 with IndexError that begins with `what`. */
int mp_index_check(Py_ssize_t index, size_t count, const char *what);

/* An index given as the only argument.  -1 with an exception. */
Py_ssize_t mp_index_parse(PyObject *argument, size_t count, const char *what);

/* Appends an index to a list of int.  0, or -1 with an exception. */
int mp_list_append_index(PyObject *list, size_t index);

/* The current exception, taken (new reference, never NULL when one is set), and set again (stolen). */
PyObject *mp_error_take(void);
void mp_error_give(PyObject *exception);

/* Keeps the current exception in *first when that is empty, else drops it. */
void mp_error_collect(PyObject **first);

/* Raises what mp_error_collect() kept (stolen), if anything.  0, or -1 with an exception. */
int mp_error_finish(PyObject *first);

/* Puts "parameter 'name': action: " before the text of the current exception, which becomes its cause.  The type stays
 * for the built-in kinds and becomes RuntimeError for others; MemoryError and what is no Exception pass as they are. */
void mp_error_name(PyObject *names, size_t row, const char *action);

/* mp_exchange_view and mp_exchange_pointer where a refusal is an error: BufferError by name.  `what` says which tensor
 * ("master", "gradient").  0, or -1 with an exception. */
int mp_view_named(mp_exchange *exchange, PyObject *tensor, mp_view *out, PyObject *names, size_t row, const char *what);
int mp_pointer_named(mp_exchange *exchange, PyObject *tensor, mp_view *out, PyObject *names, size_t row,
                     const char *what);

/* Where a tensor's implementation lies, or NULL; to be prefetched, never to be read.  Leaves no exception. */
const char *mp_hint_of(PyObject *tensor);

/* Asks for a tensor's Python object and the cache lines of its implementation that reading or switching it takes. */
static inline void
mp_prefetch_tensor(const PyObject *object, const char *impl)
{
    __builtin_prefetch(object);
    __builtin_prefetch(impl);
    __builtin_prefetch(impl + 64);
    __builtin_prefetch(impl + 128);
}

#endif
