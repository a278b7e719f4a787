/* The host backend: processor memory, one device, one stream (host/stream.h).
 *
 * The calling thread is the caller's stream: whatever it did before a call is done, and what it does after a wait
 * sees the work it waited for.  An event is the number of the newest run at the time of its record.  A forked child
 * owns the same device with the same pending work, and a worker of its own once it needs one.
 */
#include "host/backend.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "core/backend.h"
#include "host/run.h"
#include "host/stream.h"

/* Of traffic, read and written.  A caller who waits at once, as the root hook does, gains nothing from the worker at any
 * size measured (0.4 to 12 MiB; 3 MiB: 129 us here against 147 at best with it, two cores), and pays for waking it with
 * milliseconds where others want the core: the one who wakes is who gets preempted.  Longer casts do go there, so that a
 * caller who waits module by module has the processor meanwhile. */
#define INLINE_BYTES ((size_t)4 << 20)

/* Of traffic, read and written.  Towards the size of a processor's last cache, what is written is gone before it is read,
 * and ordinary stores only fetch it once more: with 32 MiB of cache, a cast and one read of its result take 7 to 19 %
 * less at 24 MiB, and 15 to 24 % less from 36 MiB on.  At 12 MiB bfloat16 takes longer to widen, without that read. */
#define STREAM_BYTES ((size_t)24 << 20)

struct mp_event {
    mp_event *next;          /* in the pool */
    _Atomic uint64_t number; /* 0: never recorded */
};

struct mp_device {
    pthread_mutex_t lock; /* guards the pool; order of locks: host/stream.c */
    mp_event *pool;
    mp_host_stream stream;
    pthread_once_t once;
    int once_code; /* errno of pthread_atfork */
    _Atomic(const mp_cast_isa *) isa; /* NULL: not chosen yet */
    atomic_size_t inline_bytes;
    atomic_size_t stream_bytes;
    _Atomic uint64_t fallible_calls; /* since mp_host_fail_at was last called */
    _Atomic uint64_t fail_at;
    _Atomic uint64_t launches, events, waits, bytes_read, bytes_written;
};

/* The one host device.  It lives as long as the process, and so may its worker. */
static mp_device host = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .stream = MP_HOST_STREAM_INIT,
    .once = PTHREAD_ONCE_INIT,
    .inline_bytes = INLINE_BYTES,
    .stream_bytes = STREAM_BYTES,
};

static void
count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

static uint64_t
counted(_Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* Every entry that can fail begins here, before it has changed anything. */
static mp_status
may_fail(const char *entry, mp_error *err)
{
    uint64_t call = atomic_fetch_add(&host.fallible_calls, 1) + 1;
    if (call != atomic_load(&host.fail_at)) {
        return MP_OK;
    }
    return mp_error_set(err, MP_ERR_DEVICE, "host %s: made to fail by mp_host_fail_at (call %llu)", entry,
                        (unsigned long long)call);
}

#define RETURN_IF_FAILS(entry, err)                                                                               \
    do {                                                                                                          \
        mp_status failed_ = may_fail(entry, err);                                                                 \
        if (failed_ != MP_OK) {                                                                                   \
            return failed_;                                                                                       \
        }                                                                                                         \
    } while (0)

/* --- the device --- */

static void
before_fork(void)
{
    pthread_mutex_lock(&host.lock);
    mp_host_stream_before_fork(&host.stream);
}

static void
after_fork_parent(void)
{
    mp_host_stream_after_fork_parent(&host.stream);
    pthread_mutex_unlock(&host.lock);
}

static void
after_fork_child(void)
{
    mp_host_stream_after_fork_child(&host.stream);
    pthread_mutex_unlock(&host.lock);
}

static void
register_fork_handlers(void)
{
    host.once_code = pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static mp_status
host_open(int index, mp_device **out, mp_error *err)
{
    RETURN_IF_FAILS("open", err);
    if (index != 0) {
        return mp_error_set(err, MP_ERR_UNAVAILABLE, "host open: there is device 0 only, not %d", index);
    }
    pthread_once(&host.once, register_fork_handlers);
    if (host.once_code != 0) {
        return mp_error_set(err, MP_ERR_MEMORY, "host open: pthread_atfork failed (%d)", host.once_code);
    }
    *out = &host;
    return MP_OK;
}

static void *
host_native_stream(mp_device *device)
{
    (void)device;
    return NULL;
}

/* The caller's stream is the calling thread: it has nothing under way. */
static mp_status
host_order_after(mp_device *device, void *caller_stream, mp_error *err)
{
    (void)device;
    (void)caller_stream;
    return may_fail("order_after", err);
}

static mp_status
host_synchronize(mp_device *device, mp_error *err)
{
    RETURN_IF_FAILS("synchronize", err);
    mp_host_stream_wait(&device->stream, mp_host_stream_last(&device->stream));
    return MP_OK;
}

static void
host_counters(mp_device *device, mp_counters *out)
{
    *out = (mp_counters){
        .launches = counted(&device->launches),
        .events = counted(&device->events),
        .waits = counted(&device->waits),
        .bytes_read = counted(&device->bytes_read),
        .bytes_written = counted(&device->bytes_written),
    };
}

/* --- launches --- */

/* The fastest instruction set unless one was asked for, which a thread that chooses meanwhile must not undo. */
static const mp_cast_isa *
chosen_isa(void)
{
    const mp_cast_isa *isa = atomic_load(&host.isa);
    if (isa == NULL) {
        const mp_cast_isa *fastest = mp_cast_select(NULL);
        isa = atomic_compare_exchange_strong(&host.isa, &isa, fastest) ? fastest : isa;
    }
    return isa;
}

/* Checks the rows and fixes everything about a run of them. */
static mp_status
make_run(const mp_row *rows, size_t row_count, double divisor, mp_host_run *run, uint64_t *read, uint64_t *written,
         mp_error *err)
{
    *read = *written = 0;
    for (size_t i = 0; i < row_count; i++) {
        const char *why = mp_row_fault(&rows[i]);
        if (why != NULL) {
            return mp_error_set(err, MP_ERR_ARGUMENT, "row %zu: %s", i, why);
        }
        mp_row_count_bytes(&rows[i], read, written);
    }
    *run = (mp_host_run){.rows = rows, .count = row_count, .isa = chosen_isa(), .divisor = divisor};
    run->stream = *read + *written >= atomic_load(&host.stream_bytes);
    return MP_OK;
}

static void
count_run(uint64_t read, uint64_t written)
{
    count(&host.launches, 1);
    count(&host.bytes_read, read);
    count(&host.bytes_written, written);
}

static mp_status
host_launch(mp_device *device, const mp_row *rows, size_t row_count, double divisor, mp_error *err)
{
    RETURN_IF_FAILS("launch", err);
    mp_host_run run;
    uint64_t read, written;
    size_t limit = atomic_load(&device->inline_bytes);
    if (make_run(rows, row_count, divisor, &run, &read, &written, err) != MP_OK ||
        mp_host_stream_submit(&device->stream, &run, limit > 0 && read + written <= limit, err) != MP_OK) {
        return err->status;
    }
    count_run(read, written);
    return MP_OK;
}

static mp_status
host_launch_on(mp_device *device, const mp_row *rows, size_t row_count, double divisor, void *caller_stream,
               mp_error *err)
{
    (void)device;
    (void)caller_stream;
    RETURN_IF_FAILS("launch_on", err);
    mp_host_run run;
    uint64_t read, written;
    if (make_run(rows, row_count, divisor, &run, &read, &written, err) != MP_OK) {
        return err->status;
    }
    mp_host_run_all(&run);
    count_run(read, written);
    return MP_OK;
}

/* --- events --- */

static mp_status
host_event_get(mp_device *device, mp_event **out, mp_error *err)
{
    RETURN_IF_FAILS("event_get", err);
    pthread_mutex_lock(&device->lock);
    mp_event *event = device->pool;
    if (event != NULL) {
        device->pool = event->next;
    }
    pthread_mutex_unlock(&device->lock);
    if (event == NULL && (event = malloc(sizeof(*event))) == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "host event_get: no memory");
    }
    event->next = NULL;
    atomic_init(&event->number, 0);
    *out = event;
    return MP_OK;
}

static void
host_event_put(mp_event *event)
{
    if (event == NULL) {
        return;
    }
    pthread_mutex_lock(&host.lock);
    event->next = host.pool;
    host.pool = event;
    pthread_mutex_unlock(&host.lock);
}

static mp_status
host_event_record(mp_event *event, mp_error *err)
{
    RETURN_IF_FAILS("event_record", err);
    atomic_store(&event->number, mp_host_stream_last(&host.stream));
    count(&host.events, 1);
    return MP_OK;
}

/* The number is read once: a record made meanwhile is the next wait's business. */
static mp_status
host_event_wait(mp_event *event, void *caller_stream, mp_error *err)
{
    (void)caller_stream;
    RETURN_IF_FAILS("event_wait", err);
    uint64_t number = atomic_load(&event->number);
    if (!mp_host_stream_done(&host.stream, number)) {
        count(&host.waits, 1);
        mp_host_stream_wait(&host.stream, number);
    }
    return MP_OK;
}

static mp_status
host_event_query(mp_event *event, int *done, mp_error *err)
{
    RETURN_IF_FAILS("event_query", err);
    *done = mp_host_stream_done(&host.stream, atomic_load(&event->number));
    if (!*done) {
        mp_host_stream_kick(&host.stream); /* a forked child that only polls */
    }
    return MP_OK;
}

static mp_status
host_event_synchronize(mp_event *event, mp_error *err)
{
    RETURN_IF_FAILS("event_synchronize", err);
    mp_host_stream_wait(&host.stream, atomic_load(&event->number));
    return MP_OK;
}

static void *
host_event_native(mp_event *event)
{
    return event;
}

/* --- knobs --- */

size_t
mp_host_set_inline_bytes(size_t bytes)
{
    return atomic_exchange(&host.inline_bytes, bytes);
}

size_t
mp_host_set_stream_bytes(size_t bytes)
{
    return atomic_exchange(&host.stream_bytes, bytes);
}

int
mp_host_set_isa(const char *name)
{
    const mp_cast_isa *isa = mp_cast_select(name);
    if (isa == NULL) {
        return -1;
    }
    atomic_store(&host.isa, isa);
    return 0;
}

const char *
mp_host_isa(void)
{
    return chosen_isa()->name;
}

void
mp_host_set_probe(void (*probe)(void *arg), void *arg)
{
    mp_host_stream_set_probe(&host.stream, probe, arg);
}

uint64_t
mp_host_fail_at(uint64_t nth)
{
    atomic_store(&host.fail_at, 0); /* nothing fails by the old count while the new one begins */
    uint64_t calls = atomic_exchange(&host.fallible_calls, 0);
    atomic_store(&host.fail_at, nth);
    return calls;
}

const mp_backend mp_backend_host = {
    .name = "host",
    .open = host_open,
    .native_stream = host_native_stream,
    .order_after = host_order_after,
    .launch = host_launch,
    .launch_on = host_launch_on,
    .event_get = host_event_get,
    .event_put = host_event_put,
    .event_record = host_event_record,
    .event_wait = host_event_wait,
    .event_query = host_event_query,
    .event_synchronize = host_event_synchronize,
    .event_native = host_event_native,
    .synchronize = host_synchronize,
    .counters = host_counters,
};
