/* The Engine type: its methods, birth and end, and garbage collection.  See engine.h for who does what.
 *
 * A pass is begin(): check() that the plan still describes the model, cast() every bucket on the private stream,
 * lower() every parameter.  Then wait hooks order the compute stream after the buckets that a module reads, and
 * restore() puts the masters back.
 */
#include "python/engine.h"

#include <structmember.h>
#include <time.h>

#include "python/functions.h"
#include "python/planning.h"

static uint64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int
mp_engine_enter(Engine *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this Engine is in use: called from within one of its own operations, or from another thread "
                        "during one");
        return -1;
    }
    self->busy = 1;
    return 0;
}

void
mp_engine_leave(Engine *self)
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

/* ---- methods ---------------------------------------------------------------------------------------------------- */

static PyObject *
engine_bind(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"masters", "lows", "arenas", NULL};
    Engine *self = (Engine *)object;
    PyObject *masters, *lows, *arenas;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:bind", keywords, &masters, &lows, &arenas) ||
        mp_engine_enter(self) < 0) {
        return NULL;
    }
    int result = mp_engine_bind(self, masters, lows, arenas);
    mp_engine_leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
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
    if (require_bound(self) < 0 || mp_engine_enter(self) < 0) {
        return NULL;
    }
    int result = mp_engine_rebind(self, (size_t)row, master);
    mp_engine_leave(self);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

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
        PyErr_Format(PyExc_IndexError, "%s(): bucket %zd: expected %s0 to %zd", method, bucket,
                     all ? "-1 (all) or " : "", (Py_ssize_t)self->plan.bucket_count - 1);
        return -1;
    }
    *out = bucket;
    return 0;
}

static PyObject *
engine_check(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    if (mp_engine_enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = mp_engine_check(self);
    self->counters.host_ns += now_ns() - start;
    mp_engine_leave(self);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static PyObject *
engine_moved(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Engine *self = (Engine *)object;
    PyObject *list = PyList_New(0);
    for (size_t row = 0; list != NULL && row < self->row_count; row++) {
        if (self->moved[row] && mp_list_append_index(list, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Runs one operation of a pass with the rows claimed, and counts its time.  `says`: it returns UNCHANGED, MOVED, ... */
static PyObject *
run(PyObject *object, int (*operation)(Engine *), int says)
{
    Engine *self = (Engine *)object;
    if (require_bound(self) < 0 || mp_engine_enter(self) < 0) {
        return NULL;
    }
    uint64_t start = now_ns();
    int result = operation(self);
    self->counters.host_ns += now_ns() - start;
    mp_engine_leave(self);
    if (result < 0) {
        return NULL;
    }
    return says ? PyLong_FromLong(result) : Py_NewRef(Py_None);
}

static PyObject *
engine_begin(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_begin, 1);
}

static PyObject *
engine_cast(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_cast, 0);
}

static PyObject *
engine_lower(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_lower, 0);
}

static PyObject *
engine_remember(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_remember, 0);
}

static PyObject *
engine_check_and_cast(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_check_and_cast, 1);
}

static PyObject *
engine_check_unwritten(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return run(object, mp_engine_check_unwritten, 1);
}

/* What is still low is put back as restore() does, which claims the rows itself. */
static PyObject *
engine_reclaim(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    PyObject *result = run(object, mp_engine_reclaim, 0);
    if (result != NULL && mp_engine_restore((Engine *)object, -1) < 0) {
        Py_CLEAR(result);
    }
    return result;
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
    int result = mp_engine_restore(self, bucket);
    self->counters.host_ns += now_ns() - start;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
engine_wait(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Engine *self = (Engine *)object;
    Py_ssize_t bucket;
    if (bucket_argument(self, "wait", args, nargs, kwnames, 1, &bucket) < 0 ||
        mp_engine_wait(self, bucket < 0 ? (Py_ssize_t)self->plan.bucket_count - 1 : bucket) < 0) {
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
    return mp_wait_hook_new(self, bucket);
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
    return mp_event_wrap(self->state, self->backend, self->device, event, mp_engine_lender(self),
                         self->device_type, self->device_index);
}

static PyObject *
engine_counters_get(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    const Engine *self = (Engine *)object;
    const engine_counters *c = &self->counters;
    return Py_BuildValue("{sKsKsKsKsKsKsnsnsK}",
                         "casts", (unsigned long long)c->casts,
                         "launches", (unsigned long long)c->launches,
                         "events", (unsigned long long)c->events,
                         "waits", (unsigned long long)c->waits,
                         "bytes_read", (unsigned long long)c->bytes_read,
                         "bytes_written", (unsigned long long)c->bytes_written,
                         "rows", (Py_ssize_t)self->row_count,
                         "buckets", (Py_ssize_t)self->plan.bucket_count,
                         "host_ns", (unsigned long long)c->host_ns);
}

static PyObject *
engine_get_buckets(PyObject *object, void *Py_UNUSED(closure))
{
    return mp_plan_buckets(&((Engine *)object)->plan);
}

static PyObject *
engine_get_rows(PyObject *object, void *Py_UNUSED(closure))
{
    return mp_plan_rows(&((Engine *)object)->plan);
}

static PyObject *
engine_get_is_low(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Engine *)object)->low_count > 0);
}

/* Nothing in the package asks for it: it is for others, as torch.cuda.ExternalStream takes it. */
static PyObject *
engine_get_native_stream(PyObject *object, void *Py_UNUSED(closure))
{
    const Engine *self = (Engine *)object;
    void *stream = self->backend->native_stream(self->device);
    return stream == NULL ? Py_NewRef(Py_None) : PyLong_FromVoidPtr(stream);
}

/* ---- construction and destruction ------------------------------------------------------------------------------- */

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
        mp_plan_parse_low(low_name, &low) < 0) {
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
    mp_attr_init(&self->version, self->state->str_version);
    if (mp_engine_setup(self, params, names, sites, first_bytes, bytes) < 0) {
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
    int stop = mp_attr_traverse(&self->version, visit, arg);
    return stop ? stop : mp_attr_traverse(&self->data, visit, arg);
}

/* The last chance for parameters that are still low: nobody else has their masters.  What somebody else has switched
 * since is left alone. */
static void
engine_finalize(PyObject *object)
{
    Engine *self = (Engine *)object;
    if (self->low_count == 0) {
        return;
    }
    PyObject *pending = PyErr_Occurred() ? mp_error_take() : NULL;
    if (mp_engine_reclaim(self) < 0) {
        PyErr_WriteUnraisable(object);
    }
    if (mp_engine_restore(self, -1) < 0) {
        PyErr_WriteUnraisable(object);
    }
    if (pending != NULL) {
        mp_error_give(pending);
    }
}

/* Breaks cycles.  A hook may still hold the engine afterwards and find that there is nothing to wait for; row and site
 * counts of 0 make every other operation a no-op. */
static int
engine_clear(PyObject *object)
{
    Engine *self = (Engine *)object;
    if (self->buckets != NULL) {
        mp_engine_drain(self);
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
    mp_attr_clear(&self->version);
    mp_attr_clear(&self->data);
    return 0;
}

static void
engine_dealloc(PyObject *object)
{
    Engine *self = (Engine *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (PyObject_CallFinalizerFromDealloc(object) < 0) {
        return; /* somebody took a new reference meanwhile */
    }
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    (void)engine_clear(object);
    for (size_t i = 0; self->buckets != NULL && i < self->plan.bucket_count; i++) {
        self->backend->event_put(self->buckets[i].event);
    }
    PyMem_Free(self->arenas);
    PyMem_Free(self->buckets);
    mp_plan_fini(&self->plan);
    PyMem_Free(self->sites);
    Py_XDECREF(self->names);
    PyMem_Free(self->moved);
    PyMem_Free(self->is_low);
    PyMem_Free(self->versions);
    PyMem_Free(self->hints);
    PyMem_Free(self->layout);
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
    {"remember", engine_remember, METH_NOARGS, "Keeps the parameters' version counters, for check_unwritten()."},
    {"check_and_cast", engine_check_and_cast, METH_NOARGS, "check(); when unchanged, cast().  Returns what check() does."},
    {"check_unwritten", engine_check_unwritten, METH_NOARGS,
     "check(); when unchanged, WRITTEN where a version counter moved since remember()."},
    {"reclaim", engine_reclaim, METH_NOARGS, "Masters in place, where somebody else may have switched .data, too."},
    {"wait", MP_FUNCTION(engine_wait), METH_FASTCALL | METH_KEYWORDS,
     "wait(bucket=-1): the current stream waits for the casts of buckets 0..bucket."},
    {"wait_hook", MP_FUNCTION(engine_wait_hook), METH_FASTCALL | METH_KEYWORDS,
     "wait_hook(bucket): a forward pre-hook that calls wait(bucket)."},
    {"event", MP_FUNCTION(engine_event), METH_FASTCALL | METH_KEYWORDS,
     "event(bucket): a new Event that covers the last cast of the bucket (and maybe of later ones)."},
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
    {Py_tp_finalize, engine_finalize},
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
    state->engine_type = mp_type_add(module, &engine_spec);
    return state->engine_type != NULL ? 0 : -1;
}
