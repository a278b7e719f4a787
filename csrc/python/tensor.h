/* Tensor -> raw facts, by the DLPack C exchange API of its type, which torch.Tensor offers since PyTorch 2.10.
 *
 * Everything here needs the GIL (or an attached thread state).  What is read is a snapshot: pointers are fetched
 * anew in every pass and never outlive the tensor they came from.
 */
#ifndef DDP_MP_EXCHANGE_H
#define DDP_MP_EXCHANGE_H

#include <Python.h>

#include "core/view.h"

typedef enum mp_exchange_result {
    MP_EXCHANGE_OK = 0,
    MP_EXCHANGE_REFUSED = 1, /* no exception set: this tensor cannot be read; `why` holds a static text.
                                The caller falls back to PyTorch operations or fails by name. */
    MP_EXCHANGE_ERROR = -1,  /* an exception is set */
} mp_exchange_result;

/* Per-module cache of exchange tables by type; lives in the module state. */
typedef struct mp_exchange mp_exchange;
mp_exchange *mp_exchange_new(void); /* NULL with MemoryError */
void mp_exchange_free(mp_exchange *exchange);
int mp_exchange_traverse(mp_exchange *exchange, visitproc visit, void *arg);
void mp_exchange_clear(mp_exchange *exchange);

/* Full description of a tensor.  Refuses, with the reason in *why: NULL data with elements, conjugate or negative bit,
 * sparse, meta, wrapper subclasses, more than MP_MAX_NDIM dimensions.  Works for tensors that require grad. */
mp_exchange_result mp_exchange_view(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why);

/* The same without the checks for conjugate and negative bits, which are up to two calls of Python methods: for tensors
 * that passed mp_exchange_view before, and for those whose shape and strides alone matter. */
mp_exchange_result mp_exchange_layout(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why);

/* The hot path: pointer, numel, dtype, device only; layout, shape and strides of *out are left untouched, and whether the
 * negative or conjugate bit is set is not asked.  For tensors that passed mp_exchange_view before: operations of PyTorch
 * do not set a bit on them afterwards.  One thing does and is not noticed: `.data` set to torch._neg_view of the same
 * memory, which has the same pointer.  Same refusals otherwise. */
mp_exchange_result mp_exchange_pointer(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why);

/* The stream that PyTorch uses now on that device: *out is a native handle, NULL is the legacy default stream.
 * Never cached.  Returns 0, or -1 with an exception.  `tensor` lends its type's exchange table. */
int mp_exchange_current_stream(mp_exchange *exchange, PyObject *tensor, int device_type, int device_index, void **out);

/* For tests on a simulated driver: host tensors are reported as memory of CUDA device 0, whose current stream is what
 * `current_stream` returns.  NULL ends it.  Callers make sure that the driver in this process is the simulated one. */
void mp_exchange_simulate(mp_exchange *exchange, void *(*current_stream)(void));

#endif
