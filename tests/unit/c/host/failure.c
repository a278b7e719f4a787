/* Every entry fails, on request and without memory. */
#include "malloc_fault.h"
#include "rig.h"
#include "tests.h"

/* Uses every entry that can fail.  Stops at the first failure, with everything given back. */
static mp_status
use_everything(float *value, const float *one, mp_error *err)
{
    mp_device *opened;
    mp_event *event = NULL;
    mp_row row = add_row(value, one, 1);
    int done;
    mp_status status = backend->open(0, &opened, err);
    status = status ? status : backend->order_after(device, NULL, err);
    status = status ? status : backend->event_get(device, &event, err);
    status = status ? status : backend->launch(device, &row, 1, 1, err);
    status = status ? status : backend->event_record(event, err);
    status = status ? status : backend->event_query(event, &done, err);
    status = status ? status : backend->event_wait(event, NULL, err);
    status = status ? status : backend->event_synchronize(event, err);
    status = status ? status : backend->launch_on(device, &row, 1, 1, NULL, err);
    status = status ? status : backend->synchronize(device, err);
    backend->event_put(event);
    return status;
}

static void
check_usable(void)
{
    float value = 0, one = 1;
    OK(backend->synchronize(device, &error));
    OK(use_everything(&value, &one, &error));
    CHECK_EQ(value, 2);
}

static void
test_every_entry_fails_on_request(void)
{
    float value = 0, one = 1;
    for (size_t inline_bytes = 0; inline_bytes <= 1024; inline_bytes += 1024) {
        size_t kept = mp_host_set_inline_bytes(inline_bytes);
        mp_host_fail_at(0);
        check_usable();
        uint64_t calls = mp_host_fail_at(0);
        CHECK_EQ(calls, 11); /* of 10 entries, one of them twice */
        for (uint64_t nth = 1; nth < calls; nth++) {
            mp_host_fail_at(nth);
            CHECK_EQ(use_everything(&value, &one, &error), MP_ERR_DEVICE);
            CHECK_EQ(error.status, MP_ERR_DEVICE);
            CHECK(strstr(error.text, "made to fail") != NULL);
            CHECK_EQ(mp_host_fail_at(0), nth);
            check_usable();
        }
        mp_host_set_inline_bytes(kept);
    }
}

static void
test_failed_launch_runs_nothing(void)
{
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    mp_counters before = counters_now();
    mp_host_fail_at(2);
    OK(backend->launch(device, &row, 1, 1, &error));
    CHECK_EQ(backend->launch(device, &row, 1, 1, &error), MP_ERR_DEVICE);
    CHECK_STR_EQ(error.text, "host launch: made to fail by mp_host_fail_at (call 2)");
    OK(backend->launch(device, &row, 1, 1, &error)); /* once only */
    OK(backend->synchronize(device, &error));
    CHECK_EQ(mp_host_fail_at(0), 4);
    CHECK_EQ(value, 2);
    CHECK_EQ(counters_now().launches, before.launches + 2);
}

static void
test_memory_out(void)
{
    enum { EVENTS = 64 };
    float value = 0, one = 1;
    mp_event *events[EVENTS] = {NULL};
    size_t kept = mp_host_set_inline_bytes(0);
    int failed = 0;
    for (long nth = 1; nth < 10; nth++) {
        malloc_fails_at(nth);
        mp_status status = use_everything(&value, &one, &error);
        malloc_fails_at(0);
        CHECK(status == MP_OK || status == MP_ERR_MEMORY);
        failed += status == MP_ERR_MEMORY;
        check_usable();
    }
    CHECK_EQ(failed, 1); /* the run with its rows; the event is pooled */
    for (size_t i = 0; i < EVENTS; i++) { /* until the pool is empty and beyond */
        malloc_fails_at(1);
        mp_status status = backend->event_get(device, &events[i], &error);
        malloc_fails_at(0);
        if (status == MP_ERR_MEMORY) {
            events[i] = event_new();
        }
        CHECK(events[i] != NULL && is_done(events[i]));
        failed += status == MP_ERR_MEMORY;
    }
    CHECK(failed > 1);
    for (size_t i = 0; i < EVENTS; i++) {
        backend->event_put(events[i]);
    }
    mp_host_set_inline_bytes(kept);
}

void
test_failure(void)
{
    test_every_entry_fails_on_request();
    test_failed_launch_runs_nothing();
    test_memory_out();
}
