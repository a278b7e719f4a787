/* Many threads that launch. */
#include <stdlib.h>

#include "rig.h"
#include "tests.h"

enum { PRODUCERS = 6, ROUNDS = 150, SHARED = 5000 };

typedef struct producer {
    unsigned index;
    float *shared; /* every run of every thread adds 1 */
    const float *one;
    long failures;
} producer;

/* Cast of a cast: its second half is right only if the runs of one thread stay in order. */
static long
produce_chain(producer *self, mp_event *event, float *source, uint16_t *low, float *back,
              int64_t numel, int round)
{
    mp_error err;
    float value = (float)((round * 7 + (int)self->index) % 200);
    for (int64_t i = 0; i < numel; i++) {
        source[i] = value;
    }
    mp_row down = cast_row(source, low, numel);
    mp_row up = {.src = low, .dst = back, .numel = numel, .src_dtype = MP_BF16, .add_dtype = MP_DTYPE_NONE,
                 .dst_dtype = MP_F32};
    long failures = backend->launch(device, &down, 1, 1, &err) != MP_OK;
    failures += backend->launch(device, &up, 1, 1, &err) != MP_OK;
    failures += backend->event_record(event, &err) != MP_OK;
    int done = 0;
    if (round % 3 == 0) {
        failures += backend->event_synchronize(event, &err) != MP_OK;
    }
    while (round % 3 == 1 && !done) {
        failures += backend->event_query(event, &done, &err) != MP_OK;
    }
    failures += backend->event_wait(event, NULL, &err) != MP_OK;
    return failures + !all_equal(back, (size_t)numel, value);
}

static void *
producer_main(void *arg)
{
    producer *self = arg;
    mp_error err;
    int64_t numel = self->index % 2 ? 300 : 200000; /* at once, and in pieces */
    float *source = floats((size_t)numel, 0), *back = floats((size_t)numel, 0);
    uint16_t *low = malloc((size_t)numel * sizeof(*low));
    mp_row row = add_row(self->shared, self->one, SHARED);
    for (int round = 0; round < ROUNDS; round++) {
        mp_event *event = NULL;
        self->failures += backend->event_get(device, &event, &err) != MP_OK;
        self->failures += backend->launch(device, &row, 1, 1, &err) != MP_OK;
        self->failures += produce_chain(self, event, source, low, back, numel, round);
        backend->event_put(event);
    }
    free(low);
    free(back);
    free(source);
    return NULL;
}

static void
test_producers(void)
{
    float *shared = floats(SHARED, 0), *one = floats(SHARED, 1);
    producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    for (unsigned i = 0; i < PRODUCERS; i++) {
        producers[i] = (producer){.index = i, .shared = shared, .one = one};
        threads[i] = spawn(producer_main, &producers[i]);
    }
    for (unsigned i = 0; i < PRODUCERS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(producers[i].failures, 0);
    }
    OK(backend->synchronize(device, &error));
    CHECK(all_equal(shared, SHARED, PRODUCERS * ROUNDS)); /* no two runs at once, none lost */
    free(one);
    free(shared);
}

static void *
launch_main(void *arg)
{
    mp_error err;
    return backend->launch(device, arg, 1, 1, &err) == MP_OK ? NULL : arg; /* one row */
}

/* What is launched while another thread runs its rows at once is left to the worker, which sleeps. */
static void
test_launch_behind_a_run_at_once(void)
{
    enum { LONG = 4000000 };
    float *values = floats(LONG, 0), *one = floats(LONG, 1);
    mp_row row = add_row(values, one, LONG);
    mp_event *event = event_new();
    void *failed;
    size_t kept = mp_host_set_inline_bytes(0);
    OK(backend->launch(device, &row, 1, 1, &error)); /* there is a worker */
    OK(backend->synchronize(device, &error));
    nap(5);
    mp_host_set_inline_bytes(SIZE_MAX);
    uint64_t launches = counters_now().launches;
    pthread_t thread = spawn(launch_main, &row);
    do { /* until the other's run is seen, under way or, if this thread was not let run, over */
        nap(0);
        OK(backend->event_record(event, &error));
    } while (is_done(event) && counters_now().launches == launches);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(event, &error));
    while (!is_done(event)) { /* no help from here */
        nap(1);
    }
    pthread_join(thread, &failed);
    CHECK(failed == NULL);
    CHECK(all_equal(values, LONG, 3));
    mp_host_set_inline_bytes(kept);
    backend->event_put(event);
    free(one);
    free(values);
}

void
test_threads(void)
{
    test_producers();
    test_launch_behind_a_run_at_once();
}
