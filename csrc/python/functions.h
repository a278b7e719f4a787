/* The module's functions, by file.  Each call adds its functions to the module: 0, or -1 with an exception. */
#ifndef DDP_MP_FUNCTIONS_H
#define DDP_MP_FUNCTIONS_H

#include <Python.h>

int mp_operations_init(PyObject *module); /* operations.c: describe, cast, fuse, unshared, current_stream, plan */
int mp_knobs_init(PyObject *module);      /* knobs.c: build_info and what tests set */

/* Method tables hold one function type; the flags beside it say what the function really takes. */
#define MP_FUNCTION(function) ((PyCFunction)(void (*)(void))(function))

#endif
