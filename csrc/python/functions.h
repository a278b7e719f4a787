/* The functions of the module. */
#ifndef DDP_MP_FUNCTIONS_H
#define DDP_MP_FUNCTIONS_H

#include <Python.h>

/* operations.c.  Adds them to the module: 0, or -1 with an exception. */
int mp_functions_init(PyObject *module);

/* operations.c.  A new list of the names of the instruction sets that run here, the fastest first, or NULL with an exception. */
PyObject *mp_usable_isas(void);

#ifdef DDP_MP_TESTING
/* tests/kit/c/testing.c.  Adds functions that only tests and benchmarks call: 0, or -1 with an exception. */
int mp_testing_init(PyObject *module);
#endif

/* Method tables hold one function type; the flags beside it say what the function really takes. */
#define MP_FUNCTION(function) ((PyCFunction)(void (*)(void))(function))

#endif
