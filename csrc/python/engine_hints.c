/* Where the objects of a pass lie in memory, so that they can be prefetched.
 *
 * In training every parameter object is cold when a pass comes: forward, backward and optimizer have used the caches
 * since.  A pass that walks them one after the other waits for memory three or four times a parameter.  All addresses
 * are known beforehand, so the loops of engine_pass.c ask for the objects of later rows while they work on this one.
 *
 * The addresses are PyTorch's own `_cdata` of tensors and storages, read once at bind().  They are hints: they are only ever
 * prefetched, never read, so that one that has become wrong costs nothing but a wasted cache line.
 */
#include "python/engine.h"

static const char *
storage_cdata(PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    const char *address = mp_hint_of(storage);
    Py_XDECREF(storage);
    PyErr_Clear();
    return address;
}

void
mp_engine_learn_row(Engine *self, size_t row)
{
    self->hints[row] = (engine_hint){
        .param = mp_hint_of(self->params[row]),
        .master = mp_hint_of(self->masters[row]),
        .low = mp_hint_of(self->lows[row]),
        .storage = storage_cdata(self->masters[row]),
    };
}
