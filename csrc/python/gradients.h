/* The inside of Gradients, shared by its files: gradients.c (the type), gradients_hook.c (the hook and what
 * it decides) and gradients_move.c (pack, give, accumulate).
 *
 * A backward is begin(), hooks that fire, then for every bucket either pack() and give() around a reduction or
 * accumulate() without one, and end().  A gradient arrives on a leaf, in low precision, and on the master where a loss
 * uses it directly or where there is no leaf.  What is reduced is the sum of both.
 *
 * Threads.  The GIL serialises.  `busy` covers one operation's calls into Python and launches without the GIL: another
 * operation raises meanwhile.  Hooks may fire; they touch flags and counts only.
 */
#ifndef DDP_MP_GRADIENTS_H
#define DDP_MP_GRADIENTS_H

#include "python/module.h"

#include "python/attr.h"
#include "python/errors.h"

typedef struct grad_row {
    PyObject *master; /* owned */
    PyObject *leaf;   /* owned; the leaf that fired last in this backward, or NULL */
    const char *hint; /* of the master, to be prefetched */
    int64_t numel;
    uint64_t layout;  /* shape and strides of the master when the plan was made, as mp_view_layout_key() */
    mp_dtype dtype;   /* of the master then; MP_DTYPE_NONE: it cannot be read, or is not dense */
    int64_t offset;   /* elements from the start of the packed bucket */
    size_t bucket;
    uint8_t cast;     /* gradients normally arrive on a leaf */
    uint8_t special;  /* in this backward the caller moves the gradient */
    uint8_t had;      /* (not cast) the master had a gradient when the backward began */
    uint8_t fired;    /* since reset(): 1, or FIRED_EMPTY */
    uint8_t counted;  /* since reset(): it fired where its gradient normally arrives, and is not pending any more */
    uint8_t fired_now; /* a bit per kind of tensor, in this backward: FIRED_LEAF, FIRED_MASTER */
    uint8_t brings;   /* since reset(): something was packed for it */
} grad_row;

enum { FIRED_LEAF = 1, FIRED_MASTER = 2 };

/* The hook was called and pack() found no gradient: autograd hands an undefined one to what a loss does not need. */
enum { FIRED_EMPTY = 2 };

typedef struct bucket_state {
    size_t *rows; /* in packing order; points into Gradients.order */
    size_t count;
    int64_t numel;
    size_t pending; /* rows that are not counted since reset() */
    int launched;
    mp_device *device; /* NULL until the device is known */
    const mp_backend *backend;
    int device_type, device_index;
} bucket_state;

/* Scratch of an operation, by position in its bucket. */
typedef struct move {
    PyObject *gradient; /* owned: what is read, of the leaf */
    PyObject *own;      /* owned: what is read or written, of the master */
    PyObject *result;   /* owned: what the master's `.grad` becomes; NULL: it stays */
} move;

typedef struct Gradients {
    PyObject_HEAD
    mp_state *state; /* borrowed from the module, which the type keeps alive */
    grad_row *rows;
    size_t row_count; /* set once all arrays exist */
    bucket_state *buckets;
    size_t bucket_count;
    size_t *order;   /* rows, bucket by bucket */
    PyObject *names; /* owned tuple of str */
    PyObject *on_first;   /* owned */
    PyObject *on_ready;   /* owned */
    PyObject *on_special; /* owned */
    PyObject *on_error;   /* owned */
    mp_attr grad;
    mp_attr requires_grad;
    mp_attr tensor_hooks; /* _backward_hooks */
    mp_attr post_hooks;   /* _post_accumulate_grad_hooks */
    int active;
    int early;
    int busy;
    Py_ssize_t fires; /* hooks that fired since begin() */
    int refired;      /* since reset(): in one backward a tensor fired twice, or both a leaf and its master */
    int direct;       /* since begin(): a gradient arrived on the master of a row that is cast */
    mp_row *work;     /* scratch of the operation that holds `busy` */
    move *moves;
    PyObject *weakrefs;
} Gradients;

static inline PyObject *
mp_gradients_name(const Gradients *self, size_t row)
{
    return PyTuple_GET_ITEM(self->names, (Py_ssize_t)row);
}

/* gradients.c: claims the scratch.  0, or -1 with an exception; every success has its leave. */
int mp_gradients_enter(Gradients *self);
void mp_gradients_leave(Gradients *self);

/* gradients_hook.c: a new hook of a row (new reference), or NULL with an exception. */
PyObject *mp_gradient_hook_new(Gradients *self, size_t row);
int mp_gradient_hook_init(PyObject *module, mp_state *state);

/* gradients_move.c: the list of rows left to the caller (new reference), or NULL with an exception.  `views`: a
 * tuple, or NULL; `used`: one byte per row, or NULL. */
PyObject *mp_gradients_pack(Gradients *self, size_t bucket, PyObject *out, double divisor);
PyObject *mp_gradients_give(Gradients *self, size_t bucket, PyObject *reduced, PyObject *views, double divisor,
                                 const uint8_t *used);
PyObject *mp_gradients_accumulate(Gradients *self, size_t bucket, PyObject *views);

#endif
