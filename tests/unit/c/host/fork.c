/* Forks: what was pending is completed in the child too, which has a worker of its own. */
#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"
#include "tests.h"

/* Threads after a fork are what is tested here. */
const char *__tsan_default_options(void);
const char *
__tsan_default_options(void)
{
    return "die_after_fork=0";
}

static atomic_int no_threads; /* pthread_create fails */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int
__wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    return atomic_load(&no_threads) ? EAGAIN : __real_pthread_create(thread, attr, start, arg);
}

/* Runs `body` in a forked child, which must end by itself with all its checks passed. */
static void
in_child(void (*body)(void *arg), void *arg)
{
    fflush(stderr);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        long before = check_failures;
        body(arg);
        _exit(check_failures != before);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

static void
child_works(void *arg)
{
    enum { MANY = 400000 };
    (void)arg;
    float *values = floats(MANY, 0), *one = floats(MANY, 1);
    mp_row row = add_row(values, one, MANY);
    mp_event *event = event_new();
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(event, &error));
    while (!is_done(event)) { /* needs a worker of its own */
        nap(1);
    }
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->synchronize(device, &error));
    CHECK(all_equal(values, MANY, 2));
    backend->event_put(event);
    free(one);
    free(values);
}

typedef struct pending {
    mp_event *event;
    const float *values;
    size_t numel;
    float expected;
} pending;

/* What was pending at the fork is completed here too, in this process's memory. */
static void
child_finishes_pending(void *arg)
{
    pending *pending = arg;
    OK(backend->event_wait(pending->event, NULL, &error));
    CHECK(all_equal(pending->values, pending->numel, pending->expected));
    child_works(NULL);
}

static void
child_polls_pending(void *arg)
{
    pending *pending = arg;
    while (!is_done(pending->event)) {
        nap(1);
    }
    CHECK(all_equal(pending->values, pending->numel, pending->expected));
    in_child(child_works, NULL); /* and its children */
}

static void
child_exits(void *arg)
{
    (void)arg;
}

static void
child_cannot_start_threads(void *arg)
{
    pending *pending = arg;
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    size_t kept = mp_host_set_inline_bytes(0);
    atomic_store(&no_threads, 1);
    OK(backend->event_wait(pending->event, NULL, &error)); /* the waiter does it all */
    CHECK(all_equal(pending->values, pending->numel, pending->expected));
    CHECK_EQ(backend->launch(device, &row, 1, 1, &error), MP_ERR_DEVICE);
    CHECK(strstr(error.text, "worker thread cannot be started") != NULL);
    OK(backend->synchronize(device, &error));
    CHECK_EQ(value, 0);
    atomic_store(&no_threads, 0);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(value, 1);
    mp_host_set_inline_bytes(kept);
}

/* Forks at every stage of a long run of additions, which would tell a piece that ran twice or not at all. */
static void
test_fork_in_the_middle(void)
{
    enum { LONG = 2000000, LAUNCHES = 8 };
    void (*const children[])(void *arg) = {child_finishes_pending, child_polls_pending, child_exits,
                                           child_cannot_start_threads};
    float *values = floats(LONG, 0), *one = floats(LONG, 1);
    mp_row row = add_row(values, one, LONG);
    pending pending = {.event = event_new(), .values = values, .numel = LONG};
    for (size_t i = 0; i < 4; i++) {
        for (int launch = 0; launch < LAUNCHES; launch++) {
            OK(backend->launch(device, &row, 1, 1, &error));
        }
        OK(backend->event_record(pending.event, &error));
        pending.expected += LAUNCHES;
        in_child(children[i], &pending);
        OK(backend->event_wait(pending.event, NULL, &error));
        CHECK(all_equal(values, LONG, pending.expected));
    }
    backend->event_put(pending.event);
    free(one);
    free(values);
}

static void
test_fork_while_held(void)
{
    float value = 0, one = 1;
    mp_row row = add_row(&value, &one, 1);
    pending pending = {.event = event_new(), .values = &value, .numel = 1, .expected = 1};
    gate gate;
    size_t kept = mp_host_set_inline_bytes(0);
    gate_close(&gate);
    OK(backend->launch(device, &row, 1, 1, &error));
    OK(backend->event_record(pending.event, &error));
    gate_wait_entered(&gate);
    waiter waiter = {.event = pending.event};
    pthread_t thread = spawn(waiter_main, &waiter);
    nap(5);
    in_child(child_finishes_pending, &pending); /* nobody holds the child's worker */
    in_child(child_cannot_start_threads, &pending);
    CHECK(!is_done(pending.event));
    CHECK_EQ(value, 0);
    sem_post(&gate.leave);
    pthread_join(thread, NULL);
    gate_open(&gate, kept);
    CHECK_EQ(value, 1);
    backend->event_put(pending.event);
}

static atomic_int stop_launching;

static void *
launcher_main(void *arg)
{
    mp_error err;
    mp_event *event = NULL;
    uintptr_t failures = backend->event_get(device, &event, &err) != MP_OK;
    for (unsigned i = 0; !atomic_load(&stop_launching); i++) {
        failures += backend->launch(device, arg, 1, 1, &err) != MP_OK; /* one row */
        failures += backend->event_record(event, &err) != MP_OK;
        failures += i % 4 == 0 && backend->event_wait(event, NULL, &err) != MP_OK;
    }
    failures += backend->event_wait(event, NULL, &err) != MP_OK;
    backend->event_put(event);
    return (void *)failures;
}

static void *
forker_main(void *arg)
{
    (void)arg;
    uintptr_t failures = 0;
    for (int i = 0; i < 15; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            _exit(backend->synchronize(device, &(mp_error){0}) != MP_OK);
        }
        int status = -1;
        failures += child < 0 || waitpid(child, &status, 0) != child || status != 0;
    }
    return (void *)failures;
}

/* Two threads fork while three launch, on the worker and at once. */
static void
test_fork_while_others_launch(void)
{
    enum { LENGTH = 60000 };
    float *values = floats(LENGTH, 0), *one = floats(LENGTH, 1);
    mp_row row = add_row(values, one, LENGTH), small = add_row(values, one, 10);
    pthread_t launchers[3], forkers[2];
    void *failures;
    atomic_store(&stop_launching, 0);
    for (size_t i = 0; i < 3; i++) {
        launchers[i] = spawn(launcher_main, i == 1 ? &small : &row);
    }
    for (size_t i = 0; i < 2; i++) {
        forkers[i] = spawn(forker_main, NULL);
    }
    for (size_t i = 0; i < 2; i++) {
        pthread_join(forkers[i], &failures);
        CHECK_EQ((uintptr_t)failures, 0);
    }
    atomic_store(&stop_launching, 1);
    for (size_t i = 0; i < 3; i++) {
        pthread_join(launchers[i], &failures);
        CHECK_EQ((uintptr_t)failures, 0);
    }
    OK(backend->synchronize(device, &error));
    free(one);
    free(values);
}

void
test_fork(void)
{
    test_fork_in_the_middle();
    test_fork_while_held();
    test_fork_while_others_launch();
}
