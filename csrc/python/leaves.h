/* The type Leaves: the leaves of one generation, and the sites that they are placed in. */
#ifndef DDP_MP_LEAVES_H
#define DDP_MP_LEAVES_H

#include "python/module.h"

/* Adds the type to the module and its state.  0, or -1 with an exception. */
int mp_leaves_init(PyObject *module, mp_state *state);

#endif
