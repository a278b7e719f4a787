/* Waits, records and rows while the worker is held. */
#include "rig.h"
#include "tests.h"

static void
test_wait_blocks_until_released(void)
{
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    gate gate;
    size_t kept = mp_host_set_inline_bytes(0);
    waiter first = {.event = event_new()}, all = {0};
    uint64_t waits = counters_now().waits;
    gate_close(&gate);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(first.event, &error));
    gate_wait_entered(&gate);
    CHECK(!is_done(first.event));
    pthread_t threads[2] = {spawn(waiter_main, &first), spawn(waiter_main, &all)};
    nap(30);
    CHECK(atomic_load(&first.started) && !atomic_load(&first.returned));
    CHECK(atomic_load(&all.started) && !atomic_load(&all.returned));
    mp_host_set_inline_bytes(SIZE_MAX); /* small, but not before what is pending */
    OK(backend->launch(device, &row, 1, 1, &error));
    mp_event *second = event_new();
    OK(backend->event_record(second, &error));
    CHECK(!is_done(second));
    CHECK_EQ(value, 0);
    sem_post(&gate.leave);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    CHECK_EQ(first.status | all.status, MP_OK);
    CHECK_EQ(counters_now().waits, waits + 1); /* synchronize is no wait of a stream */
    gate_wait_entered(&gate);
    CHECK_EQ(value, 1);
    CHECK(is_done(first.event));
    CHECK(!is_done(second));
    CHECK_STR_EQ(gate.name, "ddp_mp host");
    CHECK(!pthread_equal(gate.thread, pthread_self()));
    CHECK(sigismember(&gate.mask, SIGINT) && sigismember(&gate.mask, SIGUSR1));
    CHECK(!sigismember(&gate.mask, SIGSEGV));
    sem_post(&gate.leave);
    OK(backend->event_synchronize(second, &error));
    CHECK_EQ(value, 2);
    gate_open(&gate, kept);
    backend->event_put(first.event);
    backend->event_put(second);
}

/* A wait takes the record that exists when it is called; a later record is not its business. */
static void
test_record_again_while_waiting(void)
{
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    gate gate;
    size_t kept = mp_host_set_inline_bytes(0);
    waiter waiter = {.event = event_new()};
    uint64_t waits = counters_now().waits;
    gate_close(&gate);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(waiter.event, &error));
    pthread_t thread = spawn(waiter_main, &waiter);
    while (counters_now().waits == waits) { /* counted after the record was read */
        nap(1);
    }
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(waiter.event, &error));
    gate_wait_entered(&gate);
    sem_post(&gate.leave); /* the first run only */
    pthread_join(thread, NULL);
    gate_wait_entered(&gate);
    CHECK(!is_done(waiter.event));
    CHECK_EQ(value, 1);
    sem_post(&gate.leave);
    gate_open(&gate, kept);
    CHECK(is_done(waiter.event));
    CHECK_EQ(value, 2);
    backend->event_put(waiter.event);
}

/* What is pending keeps the rows that it was launched with, whatever their owner writes there. */
static void
test_rows_change_while_pending(void)
{
    float values[3] = {0}, one = 1;
    mp_row rows[2] = {add_row(&values[0], &one, 1), {0}};
    gate gate;
    size_t kept = mp_host_set_inline_bytes(0);
    gate_close(&gate);
    OK(backend->launch(device, rows, 1, 1, &error));
    gate_wait_entered(&gate);
    rows[0] = add_row(&values[1], &one, 1);
    rows[1] = add_row(&values[2], &one, 1);
    OK(backend->launch(device, rows, 2, 1, &error));
    OK(backend->launch(device, rows, 2, 1, &error));
    OK(backend->launch_on(device, rows, 2, 1, NULL, &error)); /* another stream: does not wait for the held one */
    CHECK_EQ(values[0], 0);
    CHECK_EQ(values[1], 1);
    memset(rows, 0xff, sizeof rows);
    for (int i = 0; i < 3; i++) {
        sem_post(&gate.leave);
    }
    gate_open(&gate, kept);
    CHECK_EQ(values[0], 1);
    CHECK_EQ(values[1], 3);
    CHECK_EQ(values[2], 3);
}

/* The probe may go while the worker is in it. */
static void
test_probe_removed_while_held(void)
{
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    gate gate;
    size_t kept = mp_host_set_inline_bytes(0);
    waiter waiter = {0};
    gate_close(&gate);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->launch(device, &row, 1, 1, &error));
    gate_wait_entered(&gate);
    mp_host_set_probe(NULL, NULL);
    pthread_t thread = spawn(waiter_main, &waiter);
    nap(10);
    CHECK(!atomic_load(&waiter.returned));
    sem_post(&gate.leave);
    pthread_join(thread, NULL);
    gate_open(&gate, kept);
    CHECK_EQ(value, 2);
}

void
test_held(void)
{
    test_wait_blocks_until_released();
    test_record_again_while_waiting();
    test_rows_change_while_pending();
    test_probe_removed_while_held();
}
