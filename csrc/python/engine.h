/* The inside of Engine, shared by its files: engine.c (the type), engine_setup.c (plan and rows of a new one),
 * engine_bind.c (which tensors), engine_pass.c (one pass: check, cast, switch, wait), engine_reuse.c (copies that outlive
 * a pass), engine_hints.c (what to prefetch) and wait_hook.c (a hook that waits).
 *
 * References.  The engine owns everything it is given.  The descriptor rows in `work` hold raw addresses inside
 * `masters` and `lows`; whatever replaces those tensors first waits for casts that may still be running (drain).
 *
 * Threads.  The GIL serialises access.  Reading or setting an attribute of a tensor subclass runs Python code, and
 * host work may run without the GIL: `busy` makes every other operation that uses or replaces rows raise in the
 * meantime.  Waiting does not count: it only touches events, which live as long as the engine, and `generation`
 * tells whether a new cast began during the wait.
 */
#ifndef DDP_MP_ENGINE_H
#define DDP_MP_ENGINE_H

#include "python/module.h"

#include "python/attr.h"
#include "core/plan.h"
#include "python/errors.h"

enum { UNCHANGED = 0, MOVED = 1, REPLACED = 2, WRITTEN = 3 }; /* module.c names them for Python */

/* A place in a module that holds a parameter. */
typedef struct engine_site {
    PyObject *dict; /* owned: module._parameters */
    PyObject *key;  /* owned, interned */
    size_t row;
} engine_site;

/* Addresses to prefetch, see engine_hints.c; any may be NULL. */
typedef struct engine_hint {
    const char *param, *master, *low; /* the tensors' implementations */
    const char *storage;              /* the master's storage */
} engine_hint;

typedef struct engine_bucket {
    mp_event *event;        /* owned, from the pool; NULL for a bucket without bytes */
    void *base;             /* arena address that the rows of `work` were made for */
    Py_ssize_t cover;       /* the last bucket up to this one that has bytes; -1: none.  Its event covers this bucket */
    uint64_t bytes_read;    /* by one launch */
    uint64_t bytes_written;
} engine_bucket;

typedef struct engine_counters {
    uint64_t casts, launches, events, waits, bytes_read, bytes_written, host_ns;
} engine_counters;

typedef struct Engine {
    PyObject_HEAD
    mp_state *state; /* borrowed from the module, which the type keeps alive */
    const mp_backend *backend;
    mp_device *device; /* lives as long as the process */
    int device_type, device_index;
    mp_dtype low;

    /* By row.  row_count is set once all arrays exist. */
    size_t row_count;
    PyObject **params;  /* owned */
    PyObject **masters; /* owned; entries are NULL before bind() */
    PyObject **lows;    /* owned; entries are NULL before bind() */
    mp_row *work;       /* in plan order; src is the master's address as last seen */
    uint64_t *layout; /* shape and strides, as mp_view_layout_key() */
    engine_hint *hints;
    int64_t *versions; /* as mp_engine_remember() read them; NULL: never */
    uint8_t *is_low;
    uint8_t *moved;
    PyObject *names; /* owned tuple of str */

    size_t site_count;
    engine_site *sites;

    mp_plan plan;
    engine_bucket *buckets;
    PyObject **arenas; /* owned, one a bucket; entries are NULL when every low owns its storage */

    mp_attr data;
    mp_attr version;
    size_t low_count; /* rows with is_low */
    int bound;
    int busy;
    int verified; /* inside begin(): check() has just read the address of every master in place */

    /* The last cast and who waited for it. */
    uint64_t generation;
    Py_ssize_t recorded;      /* last bucket whose event was recorded; -1: nothing to wait for */
    Py_ssize_t waited;        /* last bucket that `waited_stream` waited for (host: known complete); -1: none */
    void *waited_stream;
    engine_counters counters;
    PyObject *weakrefs;
} Engine;

static inline PyObject *
mp_engine_name(const Engine *self, size_t row)
{
    return PyTuple_GET_ITEM(self->names, (Py_ssize_t)row);
}

static inline int
mp_engine_on_host(const Engine *self)
{
    return self->device_type == MP_DEVICE_TYPE_HOST;
}

/* A tensor of the device (borrowed) that lends its type for the current stream: a low is always a plain one. */
static inline PyObject *
mp_engine_lender(const Engine *self)
{
    return self->bound ? self->lows[0] : self->params[0];
}

/* engine.c: claims the rows for one operation.  0, or -1 with an exception; every success has its leave. */
int mp_engine_enter(Engine *self);
void mp_engine_leave(Engine *self);

/* engine_setup.c: fills a new engine.  0, or -1 with an exception: what is there then, dealloc frees. */
int mp_engine_setup(Engine *self, PyObject *params, PyObject *names, PyObject *sites, long long first_bytes,
                    long long bytes);

/* engine_pass.c.  All need the GIL; those that return int: 0 (check, begin: UNCHANGED, MOVED or REPLACED), or -1 with
 * an exception.  check, cast, lower and begin need mp_engine_enter() around them; the last three a bound engine. */
int mp_engine_check(Engine *self);
int mp_engine_cast(Engine *self);
int mp_engine_lower(Engine *self);
int mp_engine_check_and_cast(Engine *self);
int mp_engine_begin(Engine *self); /* and lower */
int mp_engine_restore(Engine *self, Py_ssize_t bucket); /* -1: all */
int mp_engine_wait(Engine *self, Py_ssize_t bucket);    /* buckets 0..bucket */

/* engine_hints.c: learns the hints of a bound row.  Leaves no exception. */
void mp_engine_learn_row(Engine *self, size_t row);

/* engine_reuse.c.  All need mp_engine_enter() around them.  remember: keeps the version counters of all rows.
 * check_unwritten: check(), and WRITTEN when a counter moved since.  reclaim: rows that are not their copies any more
 * count as masters. */
int mp_engine_remember(Engine *self);
int mp_engine_check_unwritten(Engine *self);
int mp_engine_reclaim(Engine *self);

/* Waits on this thread until no cast reads a master or writes a low: before such a tensor may be let go. */
void mp_engine_drain(Engine *self);

/* engine_bind.c: need mp_engine_enter() around them.  0, or -1 with an exception and nothing changed. */
int mp_engine_bind(Engine *self, PyObject *masters, PyObject *lows, PyObject *arenas);
int mp_engine_rebind(Engine *self, size_t row, PyObject *master);

/* wait_hook.c: a new hook that calls mp_engine_wait(engine, bucket) while there is something to wait for, or NULL with an
 * exception. */
PyObject *mp_wait_hook_new(Engine *engine, Py_ssize_t bucket);

#endif
