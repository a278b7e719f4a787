/* One pass of an Engine: is the plan still true, cast, switch `.data`, wait, switch back. */
#include "python/engine.h"

#include <string.h>

/* cudaStreamPerThread: one handle that means another stream in every thread, so that it cannot be compared. */
#define STREAM_PER_THREAD ((void *)2)

/* ---- prefetching ------------------------------------------------------------------------------------------------ */

/* Rows ahead.  At some 100 ns of work a row this is a little more than one access to memory; 4 to 16 measure alike. */
#define AHEAD 8

static inline void
prefetch_param(const Engine *self, size_t row)
{
    if (row < self->row_count) {
        mp_prefetch_tensor(self->params[row], self->hints[row].param);
        __builtin_prefetch(self->hints[row].storage);
    }
}

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

/* The current stream waits for the casts of buckets 0..bucket.  One event is enough: the stream is in order. */
int
mp_engine_wait(Engine *self, Py_ssize_t bucket)
{
    Py_ssize_t target = self->buckets[bucket].cover;
    target = target < self->recorded ? target : self->recorded;
    if (target < 0 || (target <= self->waited && mp_engine_on_host(self))) {
        return 0;
    }
    void *stream = NULL;
    mp_error err;
    mp_status status;
    uint64_t generation = self->generation;
    if (mp_engine_on_host(self)) {
        int blocked;
        status = mp_event_wait_on_host(self->backend, self->buckets[target].event, &blocked, &err);
        self->counters.waits += (uint64_t)blocked;
    }
    else {
        if (mp_exchange_current_stream(self->state->exchange, mp_engine_lender(self), self->device_type,
                                       self->device_index, &stream) < 0) {
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

/* Errors are of no use here: after a device error nothing runs any more. */
void
mp_engine_drain(Engine *self)
{
    if (self->recorded < 0) {
        return;
    }
    mp_event *event = self->buckets[self->recorded].event;
    mp_error err;
    int done = 0;
    if (self->backend->event_query(event, &done, &err) != MP_OK || !done) {
        Py_BEGIN_ALLOW_THREADS
        self->backend->event_synchronize(event, &err);
        Py_END_ALLOW_THREADS
    }
}

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
    mp_exchange_result result = mp_exchange_layout(self->state->exchange, self->params[row], &view, &why);
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading its address");
        return -1;
    }
    const mp_row *work = &self->work[row];
    self->moved[row] = result == MP_EXCHANGE_REFUSED || view.numel != work->numel || view.dtype != work->src_dtype ||
                       (view.data != work->src && view.numel > 0) || mp_view_layout_key(&view) != self->layout[row] ||
                       !mp_view_same_device(&view, self->device_type, self->device_index);
    return self->moved[row];
}

/* UNCHANGED, MOVED or REPLACED, or -1 with an exception.  Rows that are low now are not compared: what `.data` shows is
 * ours. */
int
mp_engine_check(Engine *self)
{
    int moved = 0;
    memset(self->moved, 0, self->row_count);
    int sites = check_sites(self);
    if (sites < 0) {
        return -1;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        prefetch_param(self, row + AHEAD);
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
                     mp_engine_name(self, row), (long long)work->numel, mp_dtype_name(work->src_dtype),
                     (long long)view.numel, mp_dtype_name(view.dtype));
        return -1;
    }
    work->src = view.data;
    return 0;
}

/* Without arenas: the low's own address. */
static int
refresh_low(Engine *self, size_t row)
{
    mp_view view;
    if (mp_pointer_named(self->state->exchange, self->lows[row], &view, self->names, row, "low-precision copy") < 0) {
        return -1;
    }
    self->work[row].dst = view.data;
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
    return 0;
}

/* Brings a bucket's rows up to date. */
static int
prepare_bucket(Engine *self, size_t index)
{
    const mp_plan_bucket *plan = &self->plan.buckets[index];
    int arenas = self->arenas[index] != NULL;
    for (size_t row = plan->first; row < plan->first + plan->count; row++) {
        if (self->work[row].numel == 0) {
            continue;
        }
        if (refresh_source(self, row) < 0 || (!arenas && refresh_low(self, row) < 0)) {
            return -1;
        }
    }
    return arenas ? refresh_arena(self, index) : 0;
}

/* Enqueues the buckets in order and records their events.  Needs no GIL: it touches nothing that waiting reads, and
 * `busy` keeps the rows.  *launched counts buckets, for the counters. */
static mp_status
launch_all(const Engine *self, void *stream, size_t *launched, mp_error *err)
{
    mp_status status = self->backend->order_after(self->device, stream, err);
    for (*launched = 0; status == MP_OK && *launched < self->plan.bucket_count; ++*launched) {
        const engine_bucket *bucket = &self->buckets[*launched];
        const mp_plan_bucket *plan = &self->plan.buckets[*launched];
        if (bucket->event == NULL) {
            continue;
        }
        status = self->backend->launch(self->device, &self->work[plan->first], plan->count, 1.0, err);
        if (status == MP_OK) {
            status = self->backend->event_record(bucket->event, err);
        }
        if (status != MP_OK) {
            break;
        }
    }
    return status;
}

static void
count_launches(Engine *self, size_t launched)
{
    for (size_t index = 0; index < launched; index++) {
        const engine_bucket *bucket = &self->buckets[index];
        if (bucket->event != NULL) {
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
    if (!mp_engine_on_host(self) || bytes <= MP_GIL_BYTES) {
        status = launch_all(self, stream, launched, err);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        status = launch_all(self, stream, launched, err);
        Py_END_ALLOW_THREADS
    }
    if (status != MP_OK) {
        /* What was enqueued has no event to wait for; a caller that frees or writes masters next must not race it. */
        mp_error ignored;
        Py_BEGIN_ALLOW_THREADS
        self->backend->synchronize(self->device, &ignored);
        Py_END_ALLOW_THREADS
    }
    return status;
}

static int
launch_counted(Engine *self, void *stream)
{
    mp_error err;
    size_t launched;
    self->recorded = -1;
    self->waited = -1;
    self->waited_stream = NULL;
    self->generation++;
    mp_status status = launch_unlocked(self, stream, &launched, &err);
    count_launches(self, launched);
    if (status != MP_OK) {
        mp_raise(self->state, &err);
        return -1;
    }
    self->recorded = self->buckets[self->plan.bucket_count - 1].cover;
    return 0;
}

int
mp_engine_cast(Engine *self)
{
    int bytes = 0;
    for (size_t index = 0; index < self->plan.bucket_count; index++) {
        if (self->buckets[index].event == NULL) {
            continue;
        }
        if (prepare_bucket(self, index) < 0) {
            return -1;
        }
        bytes = 1;
    }
    if (bytes) {
        void *stream = NULL;
        if (mp_exchange_current_stream(self->state->exchange, mp_engine_lender(self), self->device_type,
                                       self->device_index, &stream) < 0 ||
            launch_counted(self, stream) < 0) {
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
        if (row + AHEAD < first + count) {
            prefetch_param(self, row + AHEAD);
            mp_prefetch_tensor(self->masters[row + AHEAD], self->hints[row + AHEAD].master);
        }
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

int
mp_engine_lower(Engine *self)
{
    for (size_t row = 0; row < self->row_count; row++) {
        if (row + AHEAD < self->row_count) {
            mp_prefetch_tensor(self->lows[row + AHEAD], self->hints[row + AHEAD].low);
        }
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
int
mp_engine_restore(Engine *self, Py_ssize_t bucket)
{
    PyObject *error = NULL;
    if (self->recorded >= 0 && mp_engine_wait(self, bucket < 0 ? self->recorded : bucket) < 0) {
        mp_error_collect(&error);
    }
    if (self->low_count > 0) {
        if (mp_engine_enter(self) < 0) {
            Py_XDECREF(error);
            return -1;
        }
        size_t first = bucket < 0 ? 0 : self->plan.buckets[bucket].first;
        size_t count = bucket < 0 ? self->row_count : self->plan.buckets[bucket].count;
        restore_rows(self, first, count, &error);
        mp_engine_leave(self);
    }
    return mp_error_finish(error);
}

int
mp_engine_check_and_cast(Engine *self)
{
    int result = mp_engine_check(self);
    if (result != UNCHANGED) {
        return result;
    }
    self->verified = 1;
    int failed = mp_engine_cast(self) < 0;
    self->verified = 0;
    return failed ? -1 : UNCHANGED;
}

int
mp_engine_begin(Engine *self)
{
    int result = mp_engine_check_and_cast(self);
    if (result != UNCHANGED) {
        return result;
    }
    return mp_engine_lower(self) < 0 ? -1 : UNCHANGED;
}
