/* Engine: casts the masters of one device into low-precision copies and switches `.data` between the two.
 *
 * A pass is begin(): check() that the plan still describes the model, cast() every bucket on the private stream,
 * lower() every parameter.  Then wait hooks order the compute stream after the buckets that a module reads, and
 * restore() puts the masters back.
 *
 * References.  The engine owns everything it is given.  The descriptor rows in `work` hold raw addresses inside
 * `masters` and `lows`; whatever replaces those tensors first waits for casts that may still be running (drain).
 *
 * Threads.  The GIL (or the caller) serialises access.  Reading or setting an attribute of a tensor subclass runs
 * Python code, and host work may run without the GIL: `busy` makes every other operation that uses or replaces rows
 * raise in the meantime.  Waiting does not count: it only touches events, which live as long as the engine, and
 * `generation` tells whether a new cast began during the wait.
 */
#include "module.h"

#include <string.h>
#include <structmember.h>
#include <time.h>

#include "attr.h"
#include "functions.h"
#include "plan.h"
#include "pyutil.h"

enum { UNCHANGED = 0, MOVED = 1, REPLACED = 2 }; /* module.c names them for Python */

/* cudaStreamPerThread: one handle that means another stream in every thread, so that it cannot be compared. */
#define STREAM_PER_THREAD ((void *)2)

/* A place in a module that holds a parameter. */
typedef struct engine_site {
    PyObject *dict; /* owned: module._parameters */
    PyObject *key;  /* owned, interned */
    size_t row;
} engine_site;

typedef struct engine_bucket {
    mp_table *table;        /* owned; NULL for a bucket without bytes */
    mp_event *event;        /* owned, from the pool; NULL for a bucket without bytes */
    void *base;             /* arena address that the rows of `work` were made for */
    Py_ssize_t cover;       /* the last bucket up to this one that has bytes; -1: none.  Its event covers this bucket */
    int stale;              /* rows changed since table_set */
    uint64_t bytes_read;    /* by one launch */
    uint64_t bytes_written;
} engine_bucket;

typedef struct engine_counters {
    uint64_t casts, launches, events, waits, uploads, bytes_read, bytes_written, host_ns;
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
    uint8_t *is_low;
    uint8_t *moved;
    PyObject *names; /* owned tuple of str */

    size_t site_count;
    engine_site *sites;

    mp_plan plan;
    engine_bucket *buckets;
    PyObject **arenas; /* owned, one a bucket; entries are NULL when every low owns its storage */

    mp_attr data;
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

typedef struct WaitHook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Engine *engine; /* owned */
    Py_ssize_t bucket;
} WaitHook;

static uint64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static PyObject *
row_name(const Engine *self, size_t row)
{
    return PyTuple_GET_ITEM(self->names, (Py_ssize_t)row);
}

static int
on_host(const Engine *self)
{
    return self->device_type == MP_DEVICE_TYPE_HOST;
}

/* Claims the rows for one operation.  Every successful enter() has its leave(). */
static int
enter(Engine *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "this Engine is in use: called from within one of its own operations, or from "
                                            "another thread during one");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static void
leave(Engine *self)
{
    self->busy = 0;
}

static int
require_bound(const Engine *self)
{
    if (!self->bound) {
        PyErr_SetString(PyExc_RuntimeError, "Engine: bind() has not been called");
        return -1;
    }
    return 0;
}

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

/* Host: blocks until the event is complete; the GIL is given up only if it is not complete yet. */
static mp_status
wait_host(Engine *self, mp_event *event, mp_error *err)
{
    int done = 0;
    mp_status status = self->backend->event_query(event, &done, err);
    if (status != MP_OK || done) {
        return status;
    }
    Py_BEGIN_ALLOW_THREADS
    status = self->backend->event_wait(event, NULL, err);
    Py_END_ALLOW_THREADS
    self->counters.waits++;
    return status;
}

/* The current stream waits for the casts of buckets 0..bucket.  One event is enough: the stream is in order. */
static int
wait_for(Engine *self, Py_ssize_t bucket)
{
    Py_ssize_t target = self->buckets[bucket].cover;
    target = target < self->recorded ? target : self->recorded;
    if (target < 0 || (target <= self->waited && on_host(self))) {
        return 0;
    }
    void *stream = NULL;
    mp_error err;
    mp_status status;
    uint64_t generation = self->generation;
    if (on_host(self)) {
        status = wait_host(self, self->buckets[target].event, &err);
    }
    else {
        if (mp_exchange_current_stream(self->state->exchange, self->params[0], self->device_type, self->device_index,
                                       &stream) < 0) {
            return -1;
        }
        if (target <= self->waited && stream == self->waited_stream && stream != STREAM_PER_THREAD) {
            return 0;
        }
        status = self->backend->event_wait(self->buckets[target].event, stream, &err);
        self->counters.waits++;
    }
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    if (generation == self->generation && (stream != self->waited_stream || target > self->waited)) {
        self->waited = target;
        self->waited_stream = stream;
    }
    return 0;
}

static int
wait_all(Engine *self)
{
    return self->recorded < 0 ? 0 : wait_for(self, self->recorded);
}

/* Waits on this thread until no cast reads a master or writes a low: before such a tensor may be let go.  Errors are of
 * no use here: after a device error nothing runs any more. */
static void
drain(Engine *self)
{
    if (self->recorded < 0) {
        return;
    }
    mp_event *event = self->buckets[self->recorded].event;
    mp_error err;
    int done = 0;
    if (self->backend->event_query(event, &done, &err) == MP_OK && !done) {
        Py_BEGIN_ALLOW_THREADS
        self->backend->event_synchronize(event, &err);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *
wait_hook_call(PyObject *callable, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(nargsf),
               PyObject *Py_UNUSED(kwnames))
{
    WaitHook *self = (WaitHook *)callable;
    if (self->engine == NULL || self->engine->recorded < 0 || wait_for(self->engine, self->bucket) == 0) {
        Py_RETURN_NONE;
    }
    return NULL;
}

static int
wait_hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((WaitHook *)object)->engine);
    return 0;
}

static int
wait_hook_clear(PyObject *object)
{
    Py_CLEAR(((WaitHook *)object)->engine);
    return 0;
}

static void
wait_hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)wait_hook_clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef wait_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(WaitHook, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot wait_hook_slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_dealloc, wait_hook_dealloc},
    {Py_tp_traverse, wait_hook_traverse},
    {Py_tp_clear, wait_hook_clear},
    {Py_tp_members, wait_hook_members},
    {Py_tp_doc, "A forward pre-hook: the current stream waits for the casts that the module reads."},
    {0, NULL},
};

static PyType_Spec wait_hook_spec = {
    .name = "ddp_mp._C.WaitHook",
    .basicsize = sizeof(WaitHook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = wait_hook_slots,
};

/* ---- checking --------------------------------------------------------------------------------------------------- */

/* 1 when every site holds the plan's parameter object, 0 when one does not, -1 with an exception. */
static int
check_sites(Engine *self)
{
    for (size_t i = 0; i < self->site_count; i++) {
        const engine_site *site = &self->sites[i];
        PyObject *found = PyDict_GetItemWithError(site->dict, site->key); /* borrowed */
        if (found == NULL && PyErr_Occurred()) {
            mp_error_name(self->names, site->row, "looking it up in its module");
            return -1;
        }
        if (found != self->params[site->row]) {
            return 0;
        }
    }
    return 1;
}

/* Sets moved[row].  A tensor that cannot be read any more (its storage was freed, say) has moved, too. */
static int
check_row(Engine *self, size_t row)
{
    mp_view view;
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_pointer(self->state->exchange, self->params[row], &view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading its address");
        return -1;
    }
    const mp_row *work = &self->work[row];
    self->moved[row] = result == MP_EXCHANGE_REFUSED || view.numel != work->numel || view.dtype != work->src_dtype ||
                       (view.data != work->src && view.numel > 0) ||
                       !mp_view_same_device(&view, self->device_type, self->device_index);
    return self->moved[row];
}

/* UNCHANGED, MOVED or REPLACED, or -1 with an exception.  Rows that are low now are not compared: what `.data` shows is
 * ours. */
static int
check(Engine *self)
{
    int moved = 0;
    memset(self->moved, 0, self->row_count);
    int sites = check_sites(self);
    if (sites < 0) {
        return -1;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        if (self->is_low[row]) {
            continue;
        }
        int result = check_row(self, row);
        if (result < 0) {
            return -1;
        }
        moved |= result;
    }
    return !sites ? REPLACED : moved ? MOVED : UNCHANGED;
}

/* ---- casting ---------------------------------------------------------------------------------------------------- */

/* Reads the master's address again unless check() has just done so through the parameter.  The alias follows its
 * storage, so that a new address is no error. */
static int
refresh_source(Engine *self, size_t row)
{
    if (self->verified && !self->is_low[row]) {
        return 0;
    }
    mp_view view;
    mp_row *work = &self->work[row];
    if (mp_pointer_named(self->state->exchange, self->masters[row], &view, self->names, row, "master") < 0) {
        return -1;
    }
    if (view.numel != work->numel || view.dtype != work->src_dtype ||
        !mp_view_same_device(&view, self->device_type, self->device_index)) {
        PyErr_Format(PyExc_RuntimeError,
                     "parameter '%U': the master that the engine holds changed: expected %lld elements of %s, found "
                     "%lld of %s",
                     row_name(self, row), (long long)work->numel, mp_dtype_name(work->src_dtype), (long long)view.numel,
                     mp_dtype_name(view.dtype));
        return -1;
    }
    if (view.data != work->src) {
        work->src = view.data;
        self->buckets[self->plan.rows[row].bucket].stale = 1;
    }
    return 0;
}

/* Without arenas: the low's own address. */
static int
refresh_low(Engine *self, size_t row, engine_bucket *bucket)
{
    mp_view view;
    mp_row *work = &self->work[row];
    if (mp_pointer_named(self->state->exchange, self->lows[row], &view, self->names, row, "low-precision copy") < 0) {
        return -1;
    }
    if (view.data != work->dst) {
        work->dst = view.data;
        bucket->stale = 1;
    }
    return 0;
}

/* With arenas: one address a bucket. */
static int
refresh_arena(Engine *self, size_t index)
{
    engine_bucket *bucket = &self->buckets[index];
    const mp_plan_bucket *plan = &self->plan.buckets[index];
    mp_view view;
    if (mp_pointer_named(self->state->exchange, self->arenas[index], &view, self->names, plan->first,
                         "arena of its bucket") < 0) {
        return -1;
    }
    if (view.data == bucket->base) {
        return 0;
    }
    for (size_t row = plan->first; row < plan->first + plan->count; row++) {
        self->work[row].dst = (char *)view.data + self->plan.rows[row].offset;
    }
    bucket->base = view.data;
    bucket->stale = 1;
    return 0;
}

static void
count_bytes(Engine *self, size_t index)
{
    engine_bucket *bucket = &self->buckets[index];
    const mp_plan_bucket *plan = &self->plan.buckets[index];
    bucket->bytes_read = 0;
    bucket->bytes_written = 0;
    for (size_t row = plan->first; row < plan->first + plan->count; row++) {
        const mp_row *work = &self->work[row];
        bucket->bytes_read += (uint64_t)work->numel * mp_dtype_size(work->src_dtype);
        bucket->bytes_written += (uint64_t)work->numel * mp_dtype_size(work->dst_dtype);
    }
}

/* Brings a bucket's rows and table up to date. */
static int
prepare_bucket(Engine *self, size_t index)
{
    engine_bucket *bucket = &self->buckets[index];
    const mp_plan_bucket *plan = &self->plan.buckets[index];
    int arenas = self->arenas[index] != NULL;
    for (size_t row = plan->first; row < plan->first + plan->count; row++) {
        if (self->work[row].numel == 0) {
            continue;
        }
        if (refresh_source(self, row) < 0 || (!arenas && refresh_low(self, row, bucket) < 0)) {
            return -1;
        }
    }
    if (arenas && refresh_arena(self, index) < 0) {
        return -1;
    }
    if (!bucket->stale) {
        return 0;
    }
    mp_error err;
    if (self->backend->table_set(bucket->table, &self->work[plan->first], plan->count, &err) != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    bucket->stale = 0;
    count_bytes(self, index);
    return 1;
}

/* Enqueues the buckets in order and records their events.  Needs no GIL, touches nothing that waiting reads: `busy` keeps the
 * rows.  *launched counts buckets, for the counters. */
static mp_status
launch_all(const Engine *self, void *stream, size_t *launched, mp_error *err)
{
    mp_status status = self->backend->order_after(self->device, stream, err);
    for (*launched = 0; status == MP_OK && *launched < self->plan.bucket_count; ++*launched) {
        const engine_bucket *bucket = &self->buckets[*launched];
        if (bucket->table == NULL) {
            continue;
        }
        status = self->backend->launch(bucket->table, 1.0, err);
        if (status == MP_OK) {
            status = self->backend->event_record(bucket->event, err);
        }
        if (status != MP_OK) {
            break;
        }
    }
    if (status != MP_OK) {
        /* What was enqueued has no event to wait for; a caller that frees or writes masters next must not race it. */
        mp_error ignored;
        self->backend->synchronize(self->device, &ignored);
    }
    return status;
}

static void
count_launches(Engine *self, size_t launched)
{
    for (size_t index = 0; index < launched; index++) {
        const engine_bucket *bucket = &self->buckets[index];
        if (bucket->table != NULL) {
            self->counters.launches++;
            self->counters.events++;
            self->counters.bytes_read += bucket->bytes_read;
            self->counters.bytes_written += bucket->bytes_written;
        }
    }
}

/* Releases the GIL on the host when the casts, which may run here and now, are long. */
static mp_status
launch_unlocked(const Engine *self, void *stream, size_t *launched, mp_error *err)
{
    mp_status status;
    uint64_t bytes = 0;
    for (size_t index = 0; index < self->plan.bucket_count; index++) {
        bytes += self->buckets[index].bytes_read;
    }
    if (!on_host(self) || bytes <= MP_GIL_BYTES) {
        return launch_all(self, stream, launched, err);
    }
    Py_BEGIN_ALLOW_THREADS
    status = launch_all(self, stream, launched, err);
    Py_END_ALLOW_THREADS
    return status;
}

static int
launch_counted(Engine *self, void *stream, int uploads)
{
    mp_counters before = {0}, after = {0};
    mp_error err;
    size_t launched;
    if (uploads) {
        self->backend->counters(self->device, &before);
    }
    self->recorded = -1;
    self->waited = -1;
    self->waited_stream = NULL;
    self->generation++;
    mp_status status = launch_unlocked(self, stream, &launched, &err);
    count_launches(self, launched);
    if (uploads) {
        self->backend->counters(self->device, &after);
        self->counters.uploads += after.uploads - before.uploads;
    }
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    self->recorded = self->buckets[self->plan.bucket_count - 1].cover;
    return 0;
}

static int
cast(Engine *self)
{
    int uploads = 0, bytes = 0;
    for (size_t index = 0; index < self->plan.bucket_count; index++) {
        if (self->buckets[index].table == NULL) {
            continue;
        }
        int changed = prepare_bucket(self, index);
        if (changed < 0) {
            return -1;
        }
        uploads |= changed;
        bytes = 1;
    }
    if (bytes) {
        void *stream = NULL;
        if (mp_exchange_current_stream(self->state->exchange, self->params[0], self->device_type, self->device_index,
                                       &stream) < 0 ||
            launch_counted(self, stream, uploads) < 0) {
            return -1;
        }
    }
    self->counters.casts++;
    return 0;
}

/* ---- switching -------------------------------------------------------------------------------------------------- */

/* Puts the masters of [first, first + count) back; goes on past errors and keeps the first. */
static void
restore_rows(Engine *self, size_t first, size_t count, PyObject **error)
{
    for (size_t row = first; row < first + count && self->low_count > 0; row++) {
        if (!self->is_low[row]) {
            continue;
        }
        if (mp_attr_set(&self->data, self->params[row], self->masters[row]) < 0) {
            mp_error_name(self->names, row, "putting its master back (param.data = master)");
            mp_error_collect(error);
            continue;
        }
        self->is_low[row] = 0;
        self->low_count--;
    }
}

static int
lower(Engine *self)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if (self->is_low[row]) {
            continue;
        }
        if (mp_attr_set(&self->data, self->params[row], self->lows[row]) < 0) {
            mp_error_name(self->names, row, "switching to low precision (param.data = low)");
            PyObject *error = mp_error_take();
            restore_rows(self, 0, self->row_count, &error);
            return mp_error_finish(error);
        }
        self->is_low[row] = 1;
        self->low_count++;
    }
    return 0;
}

/* The casts of what comes back are waited for, too: whoever has the masters may write them. */
static int
restore(Engine *self, Py_ssize_t bucket)
{
    PyObject *error = NULL;
    if (self->recorded >= 0 && wait_for(self, bucket < 0 ? self->recorded : bucket) < 0) {
        mp_error_collect(&error);
    }
    if (self->low_count > 0) {
        if (enter(self) < 0) {
            Py_XDECREF(error);
            return -1;
        }
        size_t first = bucket < 0 ? 0 : self->plan.buckets[bucket].first;
        size_t count = bucket < 0 ? self->row_count : self->plan.buckets[bucket].count;
        restore_rows(self, first, count, &error);
        leave(self);
    }
    return mp_error_finish(error);
}

/* ---- binding ---------------------------------------------------------------------------------------------------- */

static int
validate_dense(const Engine *self, size_t row, const char *what, const mp_view *view)
{
    if (view->layout != MP_LAYOUT_DENSE) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s has gaps or overlaps in memory: expected a dense layout",
                     row_name(self, row), what);
        return -1;
    }
    if (view->numel != self->plan.rows[row].numel) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s has %lld elements: expected %lld, as planned",
                     row_name(self, row), what, (long long)view->numel, (long long)self->plan.rows[row].numel);
        return -1;
    }
    if (!mp_view_same_device(view, self->device_type, self->device_index)) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s is on device (%d, %d): expected (%d, %d)",
                     row_name(self, row), what, view->device_type, view->device_index, self->device_type,
                     self->device_index);
        return -1;
    }
    return 0;
}

static int
validate_master(const Engine *self, size_t row, PyObject *master, mp_view *view)
{
    if (mp_view_named(self->state->exchange, master, view, self->names, row, "master") < 0 ||
        validate_dense(self, row, "master", view) < 0) {
        return -1;
    }
    if (view->dtype == MP_DTYPE_NONE) {
        PyErr_Format(PyExc_TypeError, "parameter '%U': the master is of a type that is not cast: expected float64, "
                                      "float32, bfloat16 or float16",
                     row_name(self, row));
        return -1;
    }
    return 0;
}

static int
validate_low(const Engine *self, size_t row, PyObject *low, const mp_view *master, mp_view *view)
{
    if (mp_view_named(self->state->exchange, low, view, self->names, row, "low-precision copy") < 0 ||
        validate_dense(self, row, "low-precision copy", view) < 0) {
        return -1;
    }
    if (view->dtype != self->low) {
        PyErr_Format(PyExc_TypeError, "parameter '%U': the low-precision copy is %s: expected %s", row_name(self, row),
                     mp_dtype_name(view->dtype), mp_dtype_name(self->low));
        return -1;
    }
    if (!mp_view_same_layout(master, view)) {
        PyErr_Format(PyExc_ValueError,
                     "parameter '%U': the low-precision copy differs from the master in shape or strides: elements are "
                     "copied in memory order",
                     row_name(self, row));
        return -1;
    }
    return 0;
}

static int
validate_arena(const Engine *self, size_t index, PyObject *arena, mp_view *view)
{
    size_t row = self->plan.buckets[index].first;
    if (mp_view_named(self->state->exchange, arena, view, self->names, row, "arena of its bucket") < 0) {
        return -1;
    }
    if (view->layout != MP_LAYOUT_DENSE || view->ndim != 1 || view->dtype != MP_DTYPE_NONE ||
        view->numel < self->plan.buckets[index].bytes ||
        !mp_view_same_device(view, self->device_type, self->device_index)) {
        PyErr_Format(PyExc_ValueError,
                     "arenas[%zu]: expected a contiguous uint8 tensor of %lld elements on device (%d, %d), got %lld elements "
                     "in %d dimensions on (%d, %d)",
                     index, (long long)self->plan.buckets[index].bytes, self->device_type, self->device_index,
                     (long long)view->numel, view->ndim, view->device_type, view->device_index);
        return -1;
    }
    return 0;
}

/* What bind() collects before it changes anything. */
typedef struct binding {
    PyObject *masters, *lows, *arenas; /* owned tuples; arenas may be NULL */
    void **bases;                      /* owned; arena addresses */
    mp_row *work;                      /* owned */
} binding;

static void
binding_fini(binding *bind)
{
    PyMem_Free(bind->work);
    PyMem_Free(bind->bases);
    Py_CLEAR(bind->arenas);
    Py_CLEAR(bind->lows);
    Py_CLEAR(bind->masters);
}

static PyObject *
tuple_of(PyObject *sequence, size_t count, const char *what, const char *unit)
{
    PyObject *tuple = PySequence_Tuple(sequence);
    if (tuple != NULL && (size_t)PyTuple_GET_SIZE(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zu, one a %s, got %zd", what, count, unit, PyTuple_GET_SIZE(tuple));
        Py_CLEAR(tuple);
    }
    return tuple;
}

static int
bind_row(Engine *self, binding *bind, size_t row)
{
    mp_view master, low;
    if (validate_master(self, row, PyTuple_GET_ITEM(bind->masters, (Py_ssize_t)row), &master) < 0 ||
        validate_low(self, row, PyTuple_GET_ITEM(bind->lows, (Py_ssize_t)row), &master, &low) < 0) {
        return -1;
    }
    if (bind->arenas != NULL && low.numel > 0) {
        const mp_plan_row *plan = &self->plan.rows[row];
        const char *expected = (const char *)bind->bases[plan->bucket] + plan->offset;
        if ((const char *)low.data != expected) {
            PyErr_Format(PyExc_ValueError,
                         "parameter '%U': the low-precision copy is not at byte %lld of the arena of bucket %d",
                         row_name(self, row), (long long)plan->offset, (int)plan->bucket);
            return -1;
        }
    }
    bind->work[row] = (mp_row){
        .src = master.data,
        .dst = low.data,
        .numel = master.numel,
        .src_dtype = master.dtype,
        .add_dtype = MP_F32, /* not read without `add`; fixed, so that equal rows have equal bytes */
        .dst_dtype = self->low,
    };
    return 0;
}

static int
bind_collect(Engine *self, binding *bind, PyObject *masters, PyObject *lows, PyObject *arenas)
{
    size_t bucket_count = self->plan.bucket_count;
    bind->masters = tuple_of(masters, self->row_count, "masters", "parameter");
    if (bind->masters == NULL || (bind->lows = tuple_of(lows, self->row_count, "lows", "parameter")) == NULL) {
        return -1;
    }
    if (arenas != Py_None && (bind->arenas = tuple_of(arenas, bucket_count, "arenas", "bucket")) == NULL) {
        return -1;
    }
    bind->bases = PyMem_Calloc(bucket_count, sizeof *bind->bases);
    bind->work = PyMem_Calloc(self->row_count, sizeof *bind->work);
    if (bind->bases == NULL || bind->work == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t index = 0; bind->arenas != NULL && index < bucket_count; index++) {
        mp_view view;
        if (self->plan.buckets[index].bytes == 0) {
            continue;
        }
        if (validate_arena(self, index, PyTuple_GET_ITEM(bind->arenas, (Py_ssize_t)index), &view) < 0) {
            return -1;
        }
        bind->bases[index] = view.data;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        if (bind_row(self, bind, row) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Swaps references: the old ones end up in the binding and are dropped by the caller, once everything is consistent. */
static int
bind_apply(Engine *self, binding *bind)
{
    PyObject *old = PyList_New(0);
    if (old == NULL) {
        return -1;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        PyObject *pair[] = {self->masters[row], self->lows[row]};
        if ((pair[0] != NULL && PyList_Append(old, pair[0]) < 0) || (pair[1] != NULL && PyList_Append(old, pair[1]) < 0)) {
            Py_DECREF(old);
            return -1;
        }
    }
    drain(self);
    for (size_t row = 0; row < self->row_count; row++) {
        Py_XSETREF(self->masters[row], Py_NewRef(PyTuple_GET_ITEM(bind->masters, (Py_ssize_t)row)));
        Py_XSETREF(self->lows[row], Py_NewRef(PyTuple_GET_ITEM(bind->lows, (Py_ssize_t)row)));
    }
    memcpy(self->work, bind->work, self->row_count * sizeof *self->work);
    for (size_t index = 0; index < self->plan.bucket_count; index++) {
        PyObject *arena = bind->arenas != NULL ? PyTuple_GET_ITEM(bind->arenas, (Py_ssize_t)index) : NULL;
        Py_XSETREF(self->arenas[index], Py_XNewRef(arena));
        self->buckets[index].base = bind->bases[index];
        self->buckets[index].stale = 1;
    }
    /* Nothing of the old tensors is worth waiting for any more. */
    self->recorded = -1;
    self->waited = -1;
    self->generation++;
    self->bound = 1;
    Py_DECREF(old);
    return 0;
}

static PyObject *
engine_bind(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"masters", "lows", "arenas", NULL};
    Engine *self = (Engine *)object;
    PyObject *masters, *lows, *arenas;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:bind", keywords, &masters, &lows, &arenas) || enter(self) < 0) {
        return NULL;
    }
    binding bind = {0};
    int result = -1;
    if (self->low_count > 0) {
        PyErr_SetString(PyExc_RuntimeError, "bind(): parameters are in low precision: restore() first");
    }
    else if (bind_collect(self, &bind, masters, lows, arenas) == 0) {
        result = bind_apply(self, &bind);
    }
    leave(self);
    binding_fini(&bind);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static int
rebind_master(Engine *self, size_t row, PyObject *master)
{
    mp_view view, low;
    if (validate_master(self, row, master, &view) < 0) {
        return -1;
    }
    /* The low's storage may be released now; its shape and strides can be read through the old master as well. */
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, self->lows[row], &low, &why);
    if (result == MP_EXCHANGE_REFUSED) {
        result = mp_exchange_view(self->state->exchange, self->masters[row], &low, &why);
    }
    if (result != MP_EXCHANGE_OK || !mp_view_same_layout(&view, &low)) {
        if (result == MP_EXCHANGE_ERROR) {
            mp_error_name(self->names, row, "reading its low-precision copy");
        }
        else {
            PyErr_Format(PyExc_ValueError,
                         "parameter '%U': the new master differs from the low-precision copy in shape or strides: bind() both",
                         row_name(self, row));
        }
        return -1;
    }
    drain(self);
    mp_row *work = &self->work[row];
    work->src = view.data;
    work->src_dtype = view.dtype;
    self->buckets[self->plan.rows[row].bucket].stale = 1;
    self->moved[row] = 0;
    Py_SETREF(self->masters[row], Py_NewRef(master));
    return 0;
}

static PyObject *
engine_rebind_master(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"row", "master", NULL};
    Engine *self = (Engine *)object;
    PyObject *master;
    Py_ssize_t row;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO:rebind_master", keywords, &row, &master)) {
        return NULL;
    }
    if (row < 0 || (size_t)row >= self->row_count) {
        PyErr_Format(PyExc_IndexError, "row %zd: expected 0 to %zu", row, self->row_count - 1);
        return NULL;
    }
    if (require_bound(self) < 0 || enter(self) < 0) {
        return NULL;
    }
    int result = rebind_master(self, (size_t)row, master);
    leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- methods ---------------------------------------------------------------------------------------------------- */

/* Parses one bucket index, by position or as bucket=; -1 stands for all where `all` allows it. */
static int
bucket_argument(const Engine *self, const char *method, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                int all, Py_ssize_t *out)
{
    Py_ssize_t count = nargs + (kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0);
    Py_ssize_t bucket = -1;
    if (count > 1 || (count == 0 && !all) ||
        (count > nargs && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "bucket") != 0)) {
        PyErr_Format(PyExc_TypeError, "%s() takes one argument, bucket", method);
        return -1;
    }
    if (count == 1) {
        bucket = PyNumber_AsSsize_t(args[0], PyExc_IndexError);
        if (bucket == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    if (bucket < (all ? -1 : 0) || bucket >= (Py_ssize_t)self->plan.bucket_count) {
        PyErr_Format(PyExc_IndexError, "%s(): bucket %zd: expected %s0 to %zd", method, bucket, all ? "-1 (all) or " : "",
                     (Py_ssize_t)self->plan.bucket_count - 1);
        return -1;
    }
    *out = bucket;
    return 0;
}

static PyObject *
engine_check(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    if (enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = check(self);
    self->counters.host_ns += now_ns() - start;
    leave(self);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static PyObject *
engine_moved(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    PyObject *list = PyList_New(0);
    for (size_t row = 0; list != NULL && row < self->row_count; row++) {
        if (!self->moved[row]) {
            continue;
        }
        PyObject *index = PyLong_FromSize_t(row);
        if (index == NULL || PyList_Append(list, index) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(index);
    }
    return list;
}

static int
begin(Engine *self)
{
    int result = check(self);
    if (result != UNCHANGED) {
        return result;
    }
    self->verified = 1;
    int failed = cast(self) < 0;
    self->verified = 0;
    return failed || lower(self) < 0 ? -1 : UNCHANGED;
}

static PyObject *
engine_begin(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    if (require_bound(self) < 0 || enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = begin(self);
    self->counters.host_ns += now_ns() - start;
    leave(self);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static PyObject *
engine_cast(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    if (require_bound(self) < 0 || enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = cast(self);
    self->counters.host_ns += now_ns() - start;
    leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
engine_lower(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    if (require_bound(self) < 0 || enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = lower(self);
    self->counters.host_ns += now_ns() - start;
    leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
engine_restore(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Engine *self = (Engine *)object;
    Py_ssize_t bucket;
    if (bucket_argument(self, "restore", args, nargs, kwnames, 1, &bucket) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = restore(self, bucket);
    self->counters.host_ns += now_ns() - start;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
engine_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Engine *self = (Engine *)object;
    Py_ssize_t bucket;
    if (bucket_argument(self, "wait", args, nargs, kwnames, 1, &bucket) < 0 ||
        (bucket < 0 ? wait_all(self) : wait_for(self, bucket)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
engine_wait_hook(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Engine *self = (Engine *)object;
    Py_ssize_t bucket;
    if (bucket_argument(self, "wait_hook", args, nargs, kwnames, 0, &bucket) < 0) {
        return NULL;
    }
    WaitHook *hook = PyObject_GC_New(WaitHook, self->state->wait_hook_type);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = wait_hook_call;
    hook->engine = (Engine *)Py_NewRef(object);
    hook->bucket = bucket;
    PyObject_GC_Track(hook);
    return (PyObject *)hook;
}

/* A fresh event, recorded now: it covers the bucket and, the stream being in order, perhaps later ones.  Waiting for
 * more than needed is right; sharing the bucket's own event is not, as the next cast records that one again. */
static PyObject *
engine_event(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Engine *self = (Engine *)object;
    Py_ssize_t bucket;
    mp_event *event = NULL;
    mp_error err;
    if (bucket_argument(self, "event", args, nargs, kwnames, 0, &bucket) < 0) {
        return NULL;
    }
    if (self->row_count == 0) {
        PyErr_SetString(PyExc_RuntimeError, "this Engine has been cleared by the garbage collector");
        return NULL;
    }
    if (self->backend->event_get(self->device, &event, &err) != MP_OK) {
        return mp_raise(self->state, &err);
    }
    if (self->recorded >= 0 && self->buckets[bucket].cover >= 0) {
        if (self->backend->event_record(event, &err) != MP_OK) {
            self->backend->event_put(event);
            return mp_raise(self->state, &err);
        }
        self->counters.events++;
    }
    return mp_event_wrap(self->state, self->backend, self->device, event, self->params[0], self->device_type,
                         self->device_index);
}

static PyObject *
engine_set_names(PyObject *object, PyObject *names)
{
    Engine *self = (Engine *)object;
    PyObject *tuple = mp_names_new(names, self->row_count);
    if (tuple == NULL) {
        return NULL;
    }
    Py_SETREF(self->names, tuple);
    Py_RETURN_NONE;
}

static PyObject *
engine_counters_get(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    const Engine *self = (Engine *)object;
    const engine_counters *c = &self->counters;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:n,s:n,s:K}", "casts", (unsigned long long)c->casts, "launches",
                         (unsigned long long)c->launches, "events", (unsigned long long)c->events, "waits",
                         (unsigned long long)c->waits, "uploads", (unsigned long long)c->uploads, "bytes_read",
                         (unsigned long long)c->bytes_read, "bytes_written", (unsigned long long)c->bytes_written, "rows",
                         (Py_ssize_t)self->row_count, "buckets", (Py_ssize_t)self->plan.bucket_count, "host_ns",
                         (unsigned long long)c->host_ns);
}

static PyObject *
engine_get_buckets(PyObject *object, void *Py_UNUSED(closure))
{
    const Engine *self = (Engine *)object;
    PyObject *list = PyList_New((Py_ssize_t)self->plan.bucket_count);
    for (size_t i = 0; list != NULL && i < self->plan.bucket_count; i++) {
        const mp_plan_bucket *bucket = &self->plan.buckets[i];
        PyObject *item = Py_BuildValue("(nnL)", (Py_ssize_t)bucket->first, (Py_ssize_t)bucket->count,
                                       (long long)bucket->bytes);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

static PyObject *
engine_get_rows(PyObject *object, void *Py_UNUSED(closure))
{
    const Engine *self = (Engine *)object;
    PyObject *list = PyList_New((Py_ssize_t)self->row_count);
    for (size_t i = 0; list != NULL && i < self->row_count; i++) {
        PyObject *item = Py_BuildValue("(iL)", (int)self->plan.rows[i].bucket, (long long)self->plan.rows[i].offset);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

static PyObject *
engine_get_is_low(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Engine *)object)->low_count > 0);
}

static PyObject *
engine_get_native_stream(PyObject *object, void *Py_UNUSED(closure))
{
    const Engine *self = (Engine *)object;
    void *stream = self->backend->native_stream(self->device);
    return stream == NULL ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(stream);
}

/* ---- construction and destruction ------------------------------------------------------------------------------- */

/* Reads every parameter once: element counts for the planner, one device for all. */
static int
take_params(Engine *self, PyObject *params, PyObject *names, int64_t *numels)
{
    size_t count = (size_t)PyTuple_GET_SIZE(params);
    for (size_t row = 0; row < count; row++) {
        PyObject *param = PyTuple_GET_ITEM(params, (Py_ssize_t)row);
        mp_view view;
        if (mp_view_named(self->state->exchange, param, &view, names, row, "data") < 0) {
            return -1;
        }
        if (row == 0) {
            self->device_type = view.device_type;
            self->device_index = view.device_index;
        }
        if (!mp_view_same_device(&view, self->device_type, self->device_index)) {
            PyErr_Format(PyExc_ValueError, "parameter '%U': on device (%d, %d), others on (%d, %d): one Engine a device",
                         row_name(self, row), view.device_type, view.device_index, self->device_type,
                         self->device_index);
            return -1;
        }
        if (view.dtype == MP_DTYPE_NONE) {
            PyErr_Format(PyExc_TypeError,
                         "parameter '%U': of a type that is not cast: expected float64, float32, bfloat16 or float16",
                         row_name(self, row));
            return -1;
        }
        numels[row] = view.numel;
        self->params[row] = Py_NewRef(param);
        self->work[row].src = view.data;
        self->work[row].src_dtype = view.dtype;
        self->work[row].numel = view.numel;
    }
    return 0;
}

static int
take_site(Engine *self, size_t index, PyObject *item)
{
    engine_site *site = &self->sites[index];
    PyObject *dict, *key;
    Py_ssize_t row;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "O!Un", &PyDict_Type, &dict, &key, &row)) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "sites[%zu]: expected (module._parameters, key, row)", index);
        }
        return -1;
    }
    if (row < 0 || (size_t)row >= self->row_count) {
        PyErr_Format(PyExc_IndexError, "sites[%zu]: row %zd: expected 0 to %zu", index, row, self->row_count - 1);
        return -1;
    }
    site->dict = Py_NewRef(dict);
    site->key = Py_NewRef(key);
    PyUnicode_InternInPlace(&site->key);
    site->row = (size_t)row;
    return 0;
}

static int
take_sites(Engine *self, PyObject *sites)
{
    PyObject *tuple = PySequence_Tuple(sites);
    if (tuple == NULL) {
        return -1;
    }
    int result = -1;
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    self->sites = PyMem_Calloc(count > 0 ? count : 1, sizeof *self->sites);
    if (self->sites == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    self->site_count = count;
    for (size_t i = 0; i < count; i++) {
        if (take_site(self, i, PyTuple_GET_ITEM(tuple, (Py_ssize_t)i)) < 0) {
            goto done;
        }
    }
    result = 0;
done:
    Py_DECREF(tuple);
    return result;
}

static int
parse_low(const char *name, mp_dtype *low)
{
    if (strncmp(name, "torch.", 6) == 0) {
        name += 6;
    }
    for (int i = 0; i < MP_NDTYPE; i++) {
        if (strcmp(name, mp_dtype_name((mp_dtype)i)) == 0) {
            *low = (mp_dtype)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError, "low_dtype '%s': expected bfloat16, float16 or float32", name);
    return -1;
}

static int
make_plan(Engine *self, const int64_t *numels, long long first_bytes, long long bytes)
{
    switch (mp_plan_init(&self->plan, numels, self->row_count, self->low, first_bytes, bytes)) {
    case MP_PLAN_OK:
        return 0;
    case MP_PLAN_MEMORY:
        PyErr_NoMemory();
        return -1;
    case MP_PLAN_OVERFLOW:
        PyErr_SetString(PyExc_OverflowError, "the parameters' low-precision copies do not fit 63 bits of bytes");
        return -1;
    default:
        PyErr_Format(PyExc_ValueError,
                     "no plan: expected a low-precision type and bucket limits of at least 1 byte, got %s, %lld and %lld",
                     mp_dtype_name(self->low), first_bytes, bytes);
        return -1;
    }
}

/* One table and one event for every bucket that has bytes. */
static int
make_buckets(Engine *self)
{
    mp_error err;
    size_t count = self->plan.bucket_count;
    self->buckets = PyMem_Calloc(count, sizeof *self->buckets);
    self->arenas = PyMem_Calloc(count, sizeof *self->arenas);
    if (self->buckets == NULL || self->arenas == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->backend->open(self->device_index, &self->device, &err) != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    Py_ssize_t cover = -1;
    for (size_t i = 0; i < count; i++) {
        engine_bucket *bucket = &self->buckets[i];
        if (self->plan.buckets[i].bytes > 0) {
            if (self->backend->table_new(self->device, &bucket->table, &err) != MP_OK ||
                self->backend->event_get(self->device, &bucket->event, &err) != MP_OK) {
                mp_raise(self->state, &err);
                return -1;
            }
            cover = (Py_ssize_t)i;
        }
        bucket->cover = cover;
        bucket->stale = 1;
    }
    return 0;
}

static int
make_rows(Engine *self, size_t count)
{
    self->params = PyMem_Calloc(count, sizeof *self->params);
    self->masters = PyMem_Calloc(count, sizeof *self->masters);
    self->lows = PyMem_Calloc(count, sizeof *self->lows);
    self->work = PyMem_Calloc(count, sizeof *self->work);
    self->is_low = PyMem_Calloc(count, 1);
    self->moved = PyMem_Calloc(count, 1);
    if (self->params == NULL || self->masters == NULL || self->lows == NULL || self->work == NULL ||
        self->is_low == NULL || self->moved == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->row_count = count;
    return 0;
}

static int
engine_setup(Engine *self, PyObject *params, PyObject *names, PyObject *sites, long long first_bytes, long long bytes)
{
    int result = -1;
    int64_t *numels = NULL;
    PyObject *tuple = PySequence_Tuple(params);
    if (tuple == NULL) {
        return -1;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(tuple);
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError, "Engine: no parameters");
        goto done;
    }
    numels = PyMem_Calloc(count, sizeof *numels);
    if (numels == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    self->names = mp_names_new(names, count);
    if (self->names == NULL || make_rows(self, count) < 0 || take_params(self, tuple, self->names, numels) < 0 ||
        (self->backend = mp_backend_for(self->device_type)) == NULL || make_plan(self, numels, first_bytes, bytes) < 0 ||
        make_buckets(self) < 0 || take_sites(self, sites) < 0) {
        goto done;
    }
    result = 0;
done:
    PyMem_Free(numels);
    Py_DECREF(tuple);
    return result;
}

static PyObject *
engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"params", "names", "sites", "low_dtype", "first_bucket_bytes", "bucket_bytes", NULL};
    PyObject *params, *names, *sites;
    const char *low_name;
    long long first_bytes, bytes;
    mp_dtype low;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOsLL:Engine", keywords, &params, &names, &sites, &low_name,
                                     &first_bytes, &bytes) ||
        parse_low(low_name, &low) < 0) {
        return NULL;
    }
    Engine *self = (Engine *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = mp_state_of_type(type);
    self->low = low;
    self->recorded = -1;
    self->waited = -1;
    mp_attr_init(&self->data, self->state->str_data);
    if (engine_setup(self, params, names, sites, first_bytes, bytes) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
engine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Engine *self = (Engine *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t row = 0; row < self->row_count; row++) {
        Py_VISIT(self->params[row]);
        Py_VISIT(self->masters[row]);
        Py_VISIT(self->lows[row]);
    }
    for (size_t i = 0; i < self->site_count; i++) {
        Py_VISIT(self->sites[i].dict);
        Py_VISIT(self->sites[i].key);
    }
    for (size_t i = 0; self->arenas != NULL && i < self->plan.bucket_count; i++) {
        Py_VISIT(self->arenas[i]);
    }
    Py_VISIT(self->names);
    return mp_attr_traverse(&self->data, visit, arg);
}

/* Breaks cycles.  A hook may still hold the engine afterwards and find that there is nothing to wait for; row and site
 * counts of 0 make every other operation a no-op. */
static int
engine_clear(PyObject *object)
{
    Engine *self = (Engine *)object;
    if (self->buckets != NULL) {
        drain(self);
    }
    self->recorded = -1;
    self->bound = 0;
    self->low_count = 0;
    size_t row_count = self->row_count, site_count = self->site_count;
    self->row_count = 0;
    self->site_count = 0;
    for (size_t i = 0; i < site_count; i++) {
        Py_CLEAR(self->sites[i].dict);
        Py_CLEAR(self->sites[i].key);
    }
    for (size_t i = 0; self->arenas != NULL && i < self->plan.bucket_count; i++) {
        Py_CLEAR(self->arenas[i]);
    }
    for (size_t row = 0; row < row_count; row++) {
        Py_CLEAR(self->params[row]);
        Py_CLEAR(self->masters[row]);
        Py_CLEAR(self->lows[row]);
    }
    mp_attr_clear(&self->data);
    return 0;
}

static void
engine_dealloc(PyObject *object)
{
    Engine *self = (Engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    (void)engine_clear(object);
    for (size_t i = 0; self->buckets != NULL && i < self->plan.bucket_count; i++) {
        self->backend->event_put(self->buckets[i].event);
        self->backend->table_free(self->buckets[i].table);
    }
    PyMem_Free(self->arenas);
    PyMem_Free(self->buckets);
    mp_plan_fini(&self->plan);
    PyMem_Free(self->sites);
    Py_XDECREF(self->names);
    PyMem_Free(self->moved);
    PyMem_Free(self->is_low);
    PyMem_Free(self->work);
    PyMem_Free(self->lows);
    PyMem_Free(self->masters);
    PyMem_Free(self->params);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef engine_methods[] = {
    {"bind", MP_FUNCTION(engine_bind), METH_VARARGS | METH_KEYWORDS,
     "bind(masters, lows, arenas): the tensors to switch between; not while is_low."},
    {"rebind_master", MP_FUNCTION(engine_rebind_master), METH_VARARGS | METH_KEYWORDS,
     "rebind_master(row, master): one new master of the same layout."},
    {"check", engine_check, METH_NOARGS, "UNCHANGED, MOVED or REPLACED: whether the plan still describes the model."},
    {"moved", engine_moved, METH_NOARGS, "Rows that the last check() found moved."},
    {"begin", engine_begin, METH_NOARGS, "check(); when unchanged, cast() and lower().  Returns what check() does."},
    {"cast", engine_cast, METH_NOARGS, "Enqueues the casts of every bucket, after the current stream's work."},
    {"lower", engine_lower, METH_NOARGS, "param.data = low for every row; on an error all rows are masters."},
    {"restore", MP_FUNCTION(engine_restore), METH_FASTCALL | METH_KEYWORDS,
     "restore(bucket=-1): param.data = master.  The current stream waits for the casts: masters may be written after."},
    {"wait", MP_FUNCTION(engine_wait), METH_FASTCALL | METH_KEYWORDS,
     "wait(bucket=-1): the current stream waits for the casts of buckets 0..bucket."},
    {"wait_hook", MP_FUNCTION(engine_wait_hook), METH_FASTCALL | METH_KEYWORDS,
     "wait_hook(bucket): a forward pre-hook that calls wait(bucket)."},
    {"event", MP_FUNCTION(engine_event), METH_FASTCALL | METH_KEYWORDS,
     "event(bucket): a new Event that covers the last cast of the bucket (and maybe of later ones)."},
    {"set_names", engine_set_names, METH_O, "set_names(names): names for messages."},
    {"counters", engine_counters_get, METH_NOARGS, "Counts since construction, as a dict."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"buckets", engine_get_buckets, NULL, "(first row, rows, arena bytes) of every bucket.", NULL},
    {"rows", engine_get_rows, NULL, "(bucket, offset in bytes) of every row.", NULL},
    {"is_low", engine_get_is_low, NULL, "Whether any row's .data is its low-precision copy now.", NULL},
    {"native_stream", engine_get_native_stream, NULL, "Handle of the private stream; None on the host.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef engine_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Engine, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},
    {Py_tp_members, engine_members},
    {Py_tp_doc, "Casts the masters of one device into low-precision copies and switches .data between the two."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "ddp_mp._C.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};

int
mp_engine_init(PyObject *module, mp_state *state)
{
    state->engine_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    if (state->engine_type == NULL || PyModule_AddType(module, state->engine_type) < 0) {
        return -1;
    }
    state->wait_hook_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &wait_hook_spec, NULL);
    if (state->wait_hook_type == NULL) {
        return -1;
    }
    return 0;
}
