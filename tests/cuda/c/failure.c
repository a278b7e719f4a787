/* Every driver call of a step, of each entry and of a capture fails once. */
#include "rig.h"
#include "tests.h"

/* A step with changed rows; stops at the first failure. */
static mp_status
try_step(fixture *f, void *stream, int64_t numel)
{
    mp_event *event = NULL;
    mp_status status;
    f->row.numel = numel;
    if ((status = backend->order_after(device, stream, &error)) != MP_OK ||
        (status = launch(f)) != MP_OK ||
        (status = backend->event_get(device, &event, &error)) != MP_OK) {
        return status;
    }
    if ((status = backend->event_record(event, &error)) == MP_OK &&
        (status = backend->event_wait(event, stream, &error)) == MP_OK) {
        status = launch_on(f, stream);
    }
    backend->event_put(event);
    return status;
}

/* Each call of a step fails once: it is told, and the steps after it are right. */
static void
test_step_survives_every_fault(void)
{
    fixture f;
    void *stream = new_stream();
    uint64_t nth = 1;
    for (mp_status status = MP_ERR_DEVICE; status != MP_OK && nth < 300; nth++) {
        sim.begin(SIM_RANDOM, nth);
        fixture_init(&f);
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 999, 1);
        status = try_step(&f, stream, COUNT);
        if (status != MP_OK) {
            CHECK(strstr(error.text, "(999)") != NULL && strstr(error.text, ", device 0") != NULL);
        }
        else {
            expect_fault_to_come("*", nth, calls);
        }
        sim.begin(SIM_RANDOM, nth); /* waits for everything: a failed step leaves its streams unordered */
        for (int step = 0; step < 3; step++) {
            one_step(&f, stream, (float)step);
        }
        OK(try_step(&f, stream, COUNT - 1));
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        expect_clean();
        fixture_fini(&f);
    }
    CHECK(nth > 15 && nth < 300);
}

/* ---- Failure of single entries ---- */

typedef struct attempt {
    fixture *f;
    mp_event *event; /* recorded, pending */
    void *stream;
} attempt;

static mp_status
try_record(attempt *a)
{
    return backend->event_record(a->event, &error);
}

static mp_status
try_wait(attempt *a)
{
    return backend->event_wait(a->event, a->stream, &error);
}

static mp_status
try_query(attempt *a)
{
    int done = 1;
    const mp_status status = backend->event_query(a->event, &done, &error);
    CHECK(status == MP_OK || !done);
    return status;
}

static mp_status
try_event_synchronize(attempt *a)
{
    return backend->event_synchronize(a->event, &error);
}

static mp_status
try_synchronize(attempt *a)
{
    (void)a;
    return backend->synchronize(device, &error);
}

static mp_status
try_order(attempt *a)
{
    return backend->order_after(device, a->stream, &error);
}

static mp_status
try_launch(attempt *a)
{
    return launch(a->f);
}

static mp_status
try_launch_on(attempt *a)
{
    return launch_on(a->f, a->stream);
}

static uint64_t
succeeded(const char *call, mp_status status)
{
    const int failed = status != MP_OK && strncmp(error.text, call, strlen(call)) == 0;
    return sim.calls(call) - (failed ? 1 : 0);
}

/* What did not happen is not counted. */
static void
expect_counted(const mp_counters *before, mp_status status)
{
    mp_counters after;
    backend->counters(device, &after);
    CHECK_EQ(after.launches - before->launches, succeeded("cuLaunchKernel", status));
    if (status != MP_OK) {
        CHECK_EQ(after.events, before->events);
        CHECK_EQ(after.waits, before->waits);
    }
}

/* Fails the nth call that an entry makes: it is told by name, the caller's context is current again,
 * nothing stays.  0 when the entry made fewer. */
static int
fail_entry(attempt *a, mp_status (*entry)(attempt *), uint64_t nth)
{
    mp_counters counted;
    void *before, *after;
    sim.begin(SIM_LAZY, nth);
    OK(launch(a->f));
    OK(backend->event_record(a->event, &error));
    const int events = sim.live("events");
    sim.begin(SIM_LAZY, nth); /* counts calls from here; what was launched is over */
    OK(backend->event_record(a->event, &error));
    backend->counters(device, &counted);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    const uint64_t calls = sim.calls("*");
    sim.fault("*", nth, 719, 1);
    const mp_status status = entry(a);
    expect_counted(&counted, status);
    if (status != MP_OK) {
        CHECK_EQ(status, MP_ERR_DEVICE);
        CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
        CHECK(strncmp(error.text, "cu", 2) == 0 && strstr(error.text, ", device 0") != NULL);
        CHECK_EQ(sim.live("events"), events);
    }
    else {
        expect_fault_to_come("*", nth, calls);
    }
    sim.begin(SIM_LAZY, nth);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
    one_step(a->f, a->stream, (float)nth);
    expect_clean();
    return status != MP_OK;
}

/* Each call of each entry fails once. */
static void
test_every_entry_survives_every_fault(void)
{
    mp_status (*const entries[])(attempt *) = {
        try_record, try_wait, try_query, try_event_synchronize, try_synchronize,
        try_order, try_launch, try_launch_on,
    };
    fixture f;
    attempt a = {&f, NULL, new_stream()};
    static mp_event *taken[POOL];
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const size_t count = drain_events(taken);
    a.event = taken[count - 1];
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        uint64_t nth = 1;
        while (fail_entry(&a, entries[i], nth) && nth < 60) {
            nth++;
        }
        CHECK(nth >= 4 && nth < 60); /* entering, the call, leaving; and a turn without a fault */
    }
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    fixture_fini(&f);
}

/* ---- Failure while events are made, and under capture ---- */

/* An event is not the caller's before it is whole, so that the pool never holds one that does not exist. */
static void
test_event_that_was_not_made_is_not_kept(void)
{
    static mp_event *taken[POOL];
    mp_event *event;
    sim.begin(SIM_LAZY, 1);
    size_t count = drain_events(taken);
    const int events = sim.live("events");
    static const char *const failing[] = {"cuCtxPushCurrent", "cuEventCreate", "cuCtxPopCurrent"};
    for (size_t i = 0; i < 3; i++) {
        sim.fault(failing[i], 1, 999, 1);
        CHECK_EQ(backend->event_get(device, &event, &error), MP_ERR_DEVICE);
        CHECK(strncmp(error.text, failing[i], strlen(failing[i])) == 0);
        CHECK(event == NULL);
        CHECK_EQ(sim.live("events"), events);
        CHECK_EQ(sim.calls("cuEventDestroy"), i == 2); /* what was made, and nothing else */
        if (i == 2) { /* leaving failed: the device's context is still on the stack */
            void *popped;
            CHECK_EQ(sim.cuCtxPopCurrent(&popped), 0);
        }
    }
    sim.begin(SIM_LAZY, 1);
    const size_t pooled = count;
    OK(backend->event_get(device, &taken[count++], &error));
    CHECK(pooled < POOL);
    sim.fault("cuEventCreate", 1, 999, 1);
    CHECK_EQ(backend->order_after(device, NULL, &error), MP_ERR_DEVICE);
    /* A record that failed is none: there is nothing to wait for. */
    int done = 0;
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->event_record(taken[count - 1], &error), MP_ERR_DEVICE);
    OK(backend->event_query(taken[count - 1], &done, &error));
    CHECK_EQ(done, 1);
    OK(backend->event_wait(taken[count - 1], NULL, &error));
    OK(backend->event_synchronize(taken[count - 1], &error));
    CHECK_EQ(sim.calls("cuEventQuery") + sim.calls("cuStreamWaitEvent") + sim.calls("cuEventSynchronize"), 0);
    OK(backend->event_record(taken[count - 1], &error));
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    expect_clean();
}

/* Each call under capture fails once: it is told, and the capture can be ended. */
static void
test_capture_survives_every_fault(void)
{
    mp_status status = MP_ERR_DEVICE;
    uint64_t nth = 1;
    for (; status != MP_OK && nth < 50; nth++) {
        fixture f;
        void *stream = new_stream(), *graph = NULL;
        sim.begin(SIM_LAZY, nth);
        fixture_init(&f);
        one_step(&f, stream, 1.0f);
        OK(backend->synchronize(device, &error));
        CHECK_EQ(sim.cuStreamBeginCapture(stream, 2), 0);
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 719, 1);
        status = launch_on(&f, stream);
        if (status != MP_OK) {
            CHECK_EQ(status, MP_ERR_DEVICE);
            CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
        }
        else {
            expect_fault_to_come("*", nth, calls);
            sim.begin(SIM_LAZY, nth); /* the fault is not for what follows */
        }
        CHECK_EQ(sim.cuStreamEndCapture(stream, &graph), 0);
        sim.begin(SIM_LAZY, nth);
        one_step(&f, stream, (float)nth);
        expect_clean();
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        fixture_fini(&f);
    }
    CHECK(nth >= 4 && nth < 50);
}

void
test_failure(void)
{
    test_step_survives_every_fault();
    test_every_entry_survives_every_fault();
    test_capture_survives_every_fault();
    test_event_that_was_not_made_is_not_kept();
}
