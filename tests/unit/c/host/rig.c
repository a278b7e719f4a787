/* The fixtures that rig.h declares. */
#include "rig.h"

#include <stdlib.h>
#include <time.h>

mp_device *device;
mp_error error;

pthread_t
spawn(void *(*start)(void *), void *arg)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, start, arg), 0);
    return thread;
}

void
nap(long milliseconds)
{
    nanosleep(&(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000}, NULL);
}

/* ---- Rows, events, values ---- */

mp_row
add_row(float *values, const float *one, int64_t numel)
{
    return (mp_row){.src = values, .add = one, .dst = values, .numel = numel, .src_dtype = MP_F32,
                    .add_dtype = MP_F32, .dst_dtype = MP_F32};
}

mp_row
cast_row(const float *src, uint16_t *dst, int64_t numel)
{
    return (mp_row){.src = src, .dst = dst, .numel = numel, .src_dtype = MP_F32, .add_dtype = MP_DTYPE_NONE,
                    .dst_dtype = MP_BF16};
}

mp_event *
event_new(void)
{
    mp_event *event = NULL;
    OK(backend->event_get(device, &event, &error));
    return event;
}

int
is_done(mp_event *event)
{
    int done = -1;
    OK(backend->event_query(event, &done, &error));
    return done;
}

mp_counters
counters_now(void)
{
    mp_counters counters;
    backend->counters(device, &counters);
    return counters;
}

float *
floats(size_t count, float value)
{
    float *values = malloc(count * sizeof(*values));
    for (size_t i = 0; i < count; i++) {
        values[i] = value;
    }
    return values;
}

int
all_equal(const float *values, size_t count, float value)
{
    for (size_t i = 0; i < count; i++) {
        if (values[i] != value) {
            return 0;
        }
    }
    return 1;
}

/* ---- A worker that is held ---- */

static void
gate_probe(void *arg)
{
    gate *gate = arg;
    gate->thread = pthread_self();
    pthread_getname_np(gate->thread, gate->name, sizeof(gate->name));
    pthread_sigmask(SIG_SETMASK, NULL, &gate->mask);
    sem_post(&gate->entered);
    while (sem_wait(&gate->leave) != 0) {
    }
}

void
gate_close(gate *gate)
{
    sem_init(&gate->entered, 0, 0);
    sem_init(&gate->leave, 0, 0);
    mp_host_set_probe(gate_probe, gate);
    mp_host_set_inline_bytes(0);
}

void
gate_open(gate *gate, size_t inline_bytes)
{
    OK(backend->synchronize(device, &error));
    mp_host_set_probe(NULL, NULL);
    mp_host_set_inline_bytes(inline_bytes);
    sem_destroy(&gate->entered);
    sem_destroy(&gate->leave);
}

void
gate_wait_entered(gate *gate)
{
    while (sem_wait(&gate->entered) != 0) {
    }
}

void *
waiter_main(void *arg)
{
    waiter *waiter = arg;
    mp_error err;
    atomic_store(&waiter->started, 1);
    waiter->status = waiter->event != NULL ? backend->event_wait(waiter->event, NULL, &err)
                                           : backend->synchronize(device, &err);
    atomic_store(&waiter->returned, 1);
    return NULL;
}
