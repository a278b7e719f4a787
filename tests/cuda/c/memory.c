/* Host memory runs out. */
#include "malloc_fault.h"
#include "rig.h"
#include "tests.h"

static void
expect_out_of_memory(mp_status status)
{
    CHECK_EQ(status, MP_ERR_MEMORY);
    CHECK(strncmp(error.text, "out of memory for ", 18) == 0);
}

static void
test_open_without_memory_is_told(void)
{
    mp_device *opened;
    sim.begin(SIM_EAGER, 1);
    malloc_fails_at(1);
    expect_out_of_memory(backend->open(0, &opened, &error));
    malloc_fails_at(0);
    CHECK(opened == NULL);
    CHECK_EQ(sim.live("contexts"), 0);
}

static void
test_event_without_memory_is_told(void)
{
    static mp_event *taken[POOL];
    mp_event *event;
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const size_t count = drain_events(taken);
    malloc_fails_at(1);
    expect_out_of_memory(backend->event_get(device, &event, &error));
    CHECK(event == NULL);
    malloc_fails_at(1);
    OK(launch(&f)); /* needs none */
    OK(launch_on(&f, backend->native_stream(device)));
    malloc_fails_at(0);
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    fixture_fini(&f);
    expect_clean();
}

void
test_memory_of_opening(void)
{
    test_open_without_memory_is_told();
}

void
test_memory(void)
{
    test_event_without_memory_is_told();
}
