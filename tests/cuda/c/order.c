/* Order between streams, the context of the caller, and the states of events. */
#include "rig.h"
#include "tests.h"

static void
test_step_is_ordered_and_cheap(void)
{
    fixture f;
    void *const streams[] = {new_stream(), NULL}; /* the legacy default stream too */
    fixture_init(&f);
    for (size_t s = 0; s < SCHEDULES; s++) {
        sim.begin(schedules[s], s);
        void *stream = streams[s % 2];
        one_step(&f, stream, 1.0f);
        one_step(&f, stream, 2.0f);
        const uint64_t created = sim.calls("cuEventCreate");
        const uint64_t launches = sim.calls("cuLaunchKernel"), records = sim.calls("cuEventRecord");
        const uint64_t waits = sim.calls("cuStreamWaitEvent");
        one_step(&f, stream, 3.0f);
        CHECK_EQ(sim.calls("cuLaunchKernel") - launches, 1);
        CHECK_EQ(sim.calls("cuEventRecord") - records, 2);
        CHECK_EQ(sim.calls("cuStreamWaitEvent") - waits, 2);
        CHECK_EQ(sim.calls("cuEventCreate"), created);
        CHECK_EQ(sim.blocking(), 0);
        expect_clean();
    }
    fixture_fini(&f);
}

/* The simulator would see a missing wait: without this the test above proves nothing. */
static void
test_missing_order_is_reported(void)
{
    fixture f;
    void *stream = new_stream();
    sim.begin(SIM_LAZY, 3);
    fixture_init(&f);
    write_masters(&f, stream, 1.0f);
    OK(launch(&f));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    CHECK(sim.report_count("RACE") > 0);
    sim.begin(SIM_LAZY, 3);
    fixture_fini(&f);
}

static void
test_context_of_the_caller_is_restored(void)
{
    fixture f;
    void *before, *after;
    sim.begin(SIM_EAGER, 1);
    fixture_init(&f);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    one_step(&f, NULL, 1.0f);
    sim.fault("cuLaunchKernel", 1, 999, 1);
    CHECK_EQ(launch(&f), MP_ERR_DEVICE);
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->order_after(device, NULL, &error), MP_ERR_DEVICE);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
    fixture_fini(&f);
}

static void
test_event_states(void)
{
    fixture f;
    mp_event *event, *again;
    int done;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 1); /* never recorded */
    OK(backend->event_wait(event, NULL, &error));
    OK(backend->event_synchronize(event, &error));
    CHECK_EQ(sim.calls("cuStreamWaitEvent") + sim.calls("cuEventSynchronize"), 0);
    OK(launch(&f));
    OK(backend->event_record(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 0);
    OK(backend->event_synchronize(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 1);
    CHECK_EQ(f.low[2], 0x4000);
    CHECK(backend->event_native(event) != NULL);
    OK(launch(&f));
    OK(backend->event_record(event, &error));
    backend->event_put(event);
    backend->event_put(NULL);
    OK(backend->event_get(device, &again, &error));
    CHECK(again == event); /* pooled */
    OK(backend->event_query(again, &done, &error));
    CHECK_EQ(done, 1); /* what it recorded before is not its own */
    backend->event_put(again);
    fixture_fini(&f);
}

void
test_order(void)
{
    test_step_is_ordered_and_cheap();
    test_missing_order_is_reported();
    test_context_of_the_caller_is_restored();
    test_event_states();
}
