/* The inside of Gradients, shared by its files: gradients.c (the type), gradients_setup.c (construction), gradients_aside.c
 * (readiness, setting aside), gradients_move.c (packing, handing over, accumulating) and fire_hook.c (the hook).
 *
 * A backward is begin(), hooks that fire, then for every bucket either pack() + hand_over() around a reduction or
 * accumulate() without one, and end().  begin() sets full-precision gradients of earlier backwards aside (stash), so
 * that autograd leaves this backward's gradient alone in `.grad`, in whatever type it computes.
 *
 * Threads.  As for Engine: the GIL serialises, `busy` covers calls into Python and launches without the GIL.  Hooks may
 * fire meanwhile; they touch flags and counts only.
 */
#ifndef DDP_MP_GRADIENTS_H
#define DDP_MP_GRADIENTS_H

#include "python/module.h"

#include "python/attr.h"
#include "python/errors.h"

/* Where a row's gradient from before begin() is now. */
enum phase {
    PHASE_IDLE = 0,  /* no backward, or one that ended: `.grad` is the caller's */
    PHASE_ASIDE = 1, /* in the stash; NULL there: there was none */
    PHASE_KEPT = 2,  /* given back in this backward, as the same object: abort() leaves it */
    PHASE_FRESH = 3, /* there was none and this backward has given one: abort() takes it away */
};

/* What is known of a row since reset(). */
enum fired {
    NOT_FIRED = 0,
    FIRED = 1,
    FIRED_EMPTY = 2, /* and pack() found no gradient: autograd hands an undefined one to what a loss does not need */
};

typedef struct grad_bucket {
    size_t *rows; /* in packing order; points into Gradients.order */
    size_t count;
    int64_t numel;
    size_t pending; /* rows that have not fired since reset() */
    int launched;
    int whole; /* the reduction loses no bit of a stash: all of it is reduced again, as in plain DDP */
} grad_bucket;

typedef struct Gradients {
    PyObject_HEAD
    mp_state *state;           /* borrowed from the module, which the type keeps alive */
    const mp_backend *backend; /* NULL until the device is known */
    mp_device *device;
    int device_type, device_index;

    /* By row.  row_count is set once all arrays exist. */
    size_t row_count;
    PyObject **params; /* owned */
    PyObject **stash;  /* owned; NULL: nothing set aside */
    PyObject **left; /* owned; what we left in `.grad`: owned so that its address is not used again.  Dropped by the
                        next begin() that finds something else */
    int64_t *left_version; /* its version counter then, or MP_WRITTEN: it has been written since */
    PyObject **base; /* owned; NULL, or the part of `left` that all ranks have: this rank has added to it */
    const char **hints;      /* of params, to be prefetched: see engine_hints.c */
    const char **view_hints; /* of what is in `views` */
    PyObject **views;        /* the views last given, compared with and nothing else: they may be gone */
    int64_t *numels;
    int64_t *offsets; /* elements from the start of the packed bucket */
    size_t *bucket_of;
    size_t *position; /* in its bucket */
    uint8_t *left_own; /* what was left is not equal on all ranks */
    uint8_t *known;    /* the stash is what we left */
    uint8_t *local;    /* the stash holds what other ranks may not have; beyond `base`, where there is one */
    int8_t *dtype;     /* mp_dtype of the parameter as given; MP_DTYPE_NONE: it cannot be read */
    uint8_t *phase;
    uint8_t *fired; /* FIRED_... */
    PyObject *names; /* owned tuple of str */

    size_t bucket_count;
    grad_bucket *buckets;
    size_t *order; /* rows, bucket by bucket */

    PyObject *on_first; /* owned */
    PyObject *on_ready; /* owned */
    PyObject *on_error; /* owned; None: nobody is told */
    mp_attr grad;
    mp_attr version;
    int active;
    int early;
    int busy;
    Py_ssize_t fires; /* hooks that fired since begin() */
    int refired;      /* some row fired more than once since reset() */

    /* Scratch of the operation that holds `busy`, by position in its bucket. */
    mp_row *work;      /* two a position: a second launch may follow the first */
    PyObject **held;   /* owned during the operation: the gradients that `work` points into */
    PyObject **result; /* owned during the operation: what `.grad` becomes */
    uint8_t *action;
    PyObject *weakrefs;
} Gradients;

/* No version counter's value. */
#define MP_WRITTEN ((int64_t)-1)

/* How many rows ahead objects are asked for, as in engine_pass.c. */
#define MP_GRADIENTS_AHEAD 8

static inline void
mp_gradients_prefetch(const Gradients *self, size_t row)
{
    mp_prefetch_tensor(self->params[row], self->hints[row]);
}

/* Whether what is set aside for the row takes part in the reduction; otherwise the result is added to it. */
static inline int
mp_gradients_reduces_stash(const Gradients *self, size_t row)
{
    return self->local[row] || self->buckets[self->bucket_of[row]].whole;
}

static inline PyObject *
mp_gradients_name(const Gradients *self, size_t row)
{
    return PyTuple_GET_ITEM(self->names, (Py_ssize_t)row);
}

/* gradients_setup.c: tp_new. */
PyObject *mp_gradients_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

/* fire_hook.c: a new hook of a row, or NULL with an exception. */
PyObject *mp_fire_hook_new(Gradients *gradients, size_t row);

/* gradients_aside.c.  All need the GIL; where they return int: 0, or -1 with an exception that names the parameter. */
int mp_gradients_enter(Gradients *self); /* claims rows and scratch; every success has its leave */
void mp_gradients_leave(Gradients *self);
int mp_gradients_set(Gradients *self, size_t row, PyObject *value); /* `.grad` = value; NULL: None */
int mp_gradients_get(Gradients *self, size_t row, PyObject **out);  /* a new reference, NULL for None */
int mp_gradients_version(Gradients *self, size_t row, PyObject *gradient, int64_t *out); /* of one of the row's */

/* The device comes with the first tensor that is seen; there is one for all.  `what` names the tensor. */
int mp_gradients_use_device(Gradients *self, const mp_view *view, const char *what);

int mp_gradients_fire(Gradients *self, size_t row); /* its hook was called */
void mp_gradients_reset(Gradients *self);           /* the next round of readiness starts */
/* How many gradients were set aside, or -1 with an exception; `fired_row`: its gradient is this backward's already. */
Py_ssize_t mp_gradients_begin(Gradients *self, int early, Py_ssize_t fired_row);
void mp_gradients_end(Gradients *self);
int mp_gradients_abort(Gradients *self);

/* gradients_move.c.  The list of rows left to the caller (new reference), or NULL with an exception. */
PyObject *mp_gradients_pack(Gradients *self, size_t bucket, PyObject *out, double divisor);
/* `views`: a tuple, or NULL; `used`: one byte a row, or NULL. */
PyObject *mp_gradients_hand_over(Gradients *self, size_t bucket, PyObject *reduced, PyObject *views, double divisor,
                                 const uint8_t *used);
PyObject *mp_gradients_accumulate(Gradients *self, size_t bucket, PyObject *views);
/* Finishes a row whose gradient the caller has made (NULL: none).  Needs mp_gradients_enter() around it. */
int mp_gradients_settle(Gradients *self, size_t row, PyObject *grad, int synced);

#endif
