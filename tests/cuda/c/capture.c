/* Capture into a graph and its replay. */
#include "rig.h"
#include "tests.h"

static const char *const forbidden[] = {"cuEventQuery", "cuEventCreate", "cuEventSynchronize", "cuStreamSynchronize"};

static void
capture_step(fixture *f, void *stream, void **graph)
{
    mp_event *event;
    OK(backend->order_after(device, stream, &error));
    OK(launch(f));
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_record(event, &error));
    OK(backend->event_wait(event, stream, &error));
    backend->event_put(event);
    OK(launch_on(f, stream));
    CHECK_EQ(sim.cuStreamEndCapture(stream, graph), 0);
}

static void
replay(const fixture *f, void *exec, void *stream, float value)
{
    write_masters(f, stream, value);
    CHECK_EQ(sim.cuGraphLaunch(exec, stream), 0);
    CHECK_EQ(read_low(f, stream), value);
}

/* A graph has the rows that it was captured with, whatever is launched outside it. */
static void
capture_and_replay(int schedule)
{
    fixture f, g;
    void *stream = new_stream(), *graph = NULL, *exec = NULL;
    uint64_t before[sizeof forbidden / sizeof *forbidden];
    sim.begin(schedule, 7);
    fixture_init(&f);
    fixture_init(&g);
    one_step(&f, stream, 1.0f);
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        before[i] = sim.calls(forbidden[i]);
    }
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 0), 0);
    capture_step(&g, stream, &graph);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        CHECK_EQ(sim.calls(forbidden[i]), before[i]);
    }
    CHECK_EQ(sim.cuGraphInstantiate(&exec, graph, 0), 0);
    one_step(&g, stream, 2.0f); /* the same rows outside the graph, which has not run */
    replay(&g, exec, stream, 3.0f);
    for (int step = 0; step < 12; step++) {
        f.row.numel = COUNT - 1 - step;
        OK(backend->order_after(device, stream, &error));
        OK(launch_on(&f, stream));
        OK(backend->order_after(device, stream, &error));
        OK(launch(&f));
        OK(backend->synchronize(device, &error));
    }
    replay(&g, exec, stream, 4.0f);
    expect_clean();
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    fixture_fini(&g);
    fixture_fini(&f);
}

/* Launches outside a capture while the private stream is part of one, which forbids this thread to ask and allocate. */
static void
test_capture_is_unharmed_by_other_streams(void)
{
    fixture f, other;
    void *stream = new_stream(), *free_stream = new_stream(), *graph = NULL;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    fixture_init(&other);
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 1), 0);
    OK(backend->order_after(device, stream, &error));
    OK(launch_on(&other, free_stream));
    capture_step(&f, stream, &graph);
    CHECK_EQ(sim.cuStreamSynchronize(free_stream), 0);
    CHECK_EQ(other.low[2], 0x4000);
    CHECK_EQ(f.low[2], 0xA5A5); /* captured, not run */
    expect_clean();
    fixture_fini(&other);
    fixture_fini(&f);
}

void
test_capture(void)
{
    for (size_t i = 0; i < SCHEDULES; i++) {
        capture_and_replay(schedules[i]);
    }
    test_capture_is_unharmed_by_other_streams();
}
