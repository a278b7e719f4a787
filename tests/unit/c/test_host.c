/* Tests of the host backend: order, events, rows that change, held workers, threads, fork, failure, exit.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *     tests/unit/c/test_host.c csrc/core/backend.c csrc/core/row.c csrc/host/backend.c csrc/host/run.c csrc/host/stream.c \
 *     csrc/host/convert.c csrc/host/convert_scalar.c csrc/host/convert_avx2.c csrc/host/convert_avx512.c \
 *     csrc/host/convert_neon.c \
 *     -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=pthread_create -o test_host
 *
 * Also with -fsanitize=thread.  Built with -O2 and without a sanitizer, `test_host measure` prints the figures that the
 * defaults in host/backend.c rest on.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "core/backend.h"
#include "host/backend.h"
#include "check.h"
#include "malloc_fault.h"

/* Threads after a fork are what is tested here. */
const char *__tsan_default_options(void);
const char *
__tsan_default_options(void)
{
    return "die_after_fork=0";
}

static const mp_backend *const backend = &mp_backend_host;
static mp_device *device;
static mp_error error;

#define OK(call) CHECK_EQ((call), MP_OK)

static atomic_int no_threads; /* pthread_create fails */
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int
__wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    return atomic_load(&no_threads) ? EAGAIN : __real_pthread_create(thread, attr, start, arg);
}

static pthread_t
spawn(void *(*start)(void *), void *arg)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, start, arg), 0);
    return thread;
}

static void
nap(long milliseconds)
{
    nanosleep(&(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000}, NULL);
}

/* --- helpers: rows, events, a worker that is held --- */

/* values[i] += one[i], a run whose count anybody can read off. */
static mp_row
add_row(float *values, const float *one, int64_t numel)
{
    return (mp_row){.src = values, .add = one, .dst = values, .numel = numel, .src_dtype = MP_F32,
                    .add_dtype = MP_F32, .dst_dtype = MP_F32};
}

static mp_row
cast_row(const float *src, uint16_t *dst, int64_t numel)
{
    return (mp_row){.src = src, .dst = dst, .numel = numel, .src_dtype = MP_F32, .add_dtype = MP_DTYPE_NONE,
                    .dst_dtype = MP_BF16};
}

static mp_event *
event_new(void)
{
    mp_event *event = NULL;
    OK(backend->event_get(device, &event, &error));
    return event;
}

static int
is_done(mp_event *event)
{
    int done = -1;
    OK(backend->event_query(event, &done, &error));
    return done;
}

static mp_counters
counters_now(void)
{
    mp_counters counters;
    backend->counters(device, &counters);
    return counters;
}

static float *
floats(size_t count, float value)
{
    float *values = malloc(count * sizeof(*values));
    for (size_t i = 0; i < count; i++) {
        values[i] = value;
    }
    return values;
}

static int
all_equal(const float *values, size_t count, float value)
{
    for (size_t i = 0; i < count; i++) {
        if (values[i] != value) {
            return 0;
        }
    }
    return 1;
}

/* The worker comes in before every run and leaves when it is let go. */
typedef struct gate {
    sem_t entered, leave;
    pthread_t thread;
    char name[16];
    sigset_t mask;
} gate;

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

static void
gate_close(gate *gate)
{
    sem_init(&gate->entered, 0, 0);
    sem_init(&gate->leave, 0, 0);
    mp_host_set_probe(gate_probe, gate);
    mp_host_set_inline_bytes(0);
}

/* Until now everything was let go that came in. */
static void
gate_open(gate *gate, size_t inline_bytes)
{
    OK(backend->synchronize(device, &error));
    mp_host_set_probe(NULL, NULL);
    mp_host_set_inline_bytes(inline_bytes);
    sem_destroy(&gate->entered);
    sem_destroy(&gate->leave);
}

static void
gate_wait_entered(gate *gate)
{
    while (sem_wait(&gate->entered) != 0) {
    }
}

/* --- one thread --- */

static void
test_device(void)
{
    mp_device *again = NULL;
    CHECK_STR_EQ(backend->name, "host");
    OK(backend->open(0, &again, &error));
    CHECK(again == device);
    CHECK_EQ(backend->open(1, &again, &error), MP_ERR_UNAVAILABLE);
    CHECK_EQ(error.status, MP_ERR_UNAVAILABLE);
    CHECK(strstr(error.text, "device 0 only, not 1") != NULL);
    CHECK_EQ(backend->open(-1, &again, &error), MP_ERR_UNAVAILABLE);
    CHECK(backend->native_stream(device) == NULL);
    OK(backend->order_after(device, NULL, &error));
    OK(backend->synchronize(device, &error));
}

static void
test_error_text(void)
{
    mp_error err;
    char digits[400];
    memset(digits, '7', sizeof(digits) - 1);
    digits[sizeof(digits) - 1] = '\0';
    CHECK_EQ(mp_error_set(&err, MP_ERR_DEVICE, "code %d", 7), MP_ERR_DEVICE);
    CHECK_STR_EQ(err.text, "code 7");
    mp_error_set(&err, MP_ERR_DEVICE, "parameter a.b: %s", err.text); /* around what is there */
    CHECK_STR_EQ(err.text, "parameter a.b: code 7");
    mp_error_set(&err, MP_ERR_MEMORY, "%s", digits);
    CHECK_EQ(strlen(err.text), sizeof(err.text) - 1);
    CHECK_EQ(err.status, MP_ERR_MEMORY);
}

static void
test_events(void)
{
    mp_event *event = event_new();
    CHECK(is_done(event)); /* never recorded */
    OK(backend->event_wait(event, NULL, &error));
    OK(backend->event_synchronize(event, &error));
    CHECK(backend->event_native(event) != NULL);
    uint64_t before = counters_now().events;
    OK(backend->event_record(event, &error)); /* nothing pending */
    CHECK(is_done(event));
    CHECK_EQ(counters_now().events, before + 1);
    backend->event_put(event);
    mp_event *again = event_new();
    CHECK(again == event); /* pooled */
    backend->event_put(again);
    backend->event_put(NULL);
}

static void
test_rows(void)
{
    float values[4] = {0}, one[4] = {1, 1, 1, 1};
    mp_row good = add_row(values, one, 4), bad;
    for (size_t inline_bytes = 0; inline_bytes <= 256; inline_bytes += 256) { /* without rows, with empty ones */
        size_t kept = mp_host_set_inline_bytes(inline_bytes);
        mp_row empty[3] = {good, good, {.dst_dtype = MP_DTYPE_NONE}};
        empty[0].numel = empty[1].numel = 0;
        OK(backend->launch(device, NULL, 0, 1, &error));
        OK(backend->launch_on(device, NULL, 0, 1, NULL, &error));
        OK(backend->launch(device, empty, 3, 1, &error));
        OK(backend->launch_on(device, empty, 3, 1, NULL, &error));
        OK(backend->synchronize(device, &error));
        mp_host_set_inline_bytes(kept);
    }
    bad = good, bad.numel = -1;
    CHECK_EQ(backend->launch(device, &bad, 1, 1, &error), MP_ERR_ARGUMENT);
    bad = good, bad.numel = INT64_MAX;
    CHECK_EQ(backend->launch(device, &bad, 1, 1, &error), MP_ERR_ARGUMENT);
    bad = good, bad.dst = NULL;
    CHECK_EQ(backend->launch_on(device, &bad, 1, 1, NULL, &error), MP_ERR_ARGUMENT);
    bad = good, bad.src_dtype = MP_DTYPE_NONE;
    CHECK_EQ(backend->launch_on(device, &bad, 1, 1, NULL, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "row 0: src has an unknown type");
    bad = good, bad.dst_dtype = MP_NDTYPE;
    CHECK_EQ(backend->launch(device, &bad, 1, 1, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "row 0: dst has an unknown type");
    bad = good, bad.add_dtype = MP_DTYPE_NONE;
    CHECK_EQ(backend->launch(device, (mp_row[]){good, bad}, 2, 1, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "row 1: add has an unknown type");
    OK(backend->synchronize(device, &error));
    CHECK(all_equal(values, 4, 0)); /* of what is refused nothing runs */
    OK(backend->launch(device, &good, 1, 1, &error));
    OK(backend->synchronize(device, &error));
    CHECK(all_equal(values, 4, 1));
}

static void
test_counters(void)
{
    float values[100] = {0}, one[100] = {0};
    mp_row row = add_row(values, one, 100);
    mp_counters before = counters_now();
    OK(backend->launch(device, &row, 1, 2, &error));
    OK(backend->launch_on(device, &row, 1, 2, NULL, &error));
    OK(backend->synchronize(device, &error));
    mp_counters after = counters_now();
    CHECK_EQ(after.launches - before.launches, 2);
    CHECK_EQ(after.bytes_read - before.bytes_read, 2 * 800);
    CHECK_EQ(after.bytes_written - before.bytes_written, 2 * 400);
    CHECK_EQ(after.waits, before.waits);
}

static void
test_knobs(void)
{
    size_t kept = mp_host_set_inline_bytes(5);
    CHECK_EQ(kept, 4 << 20);
    CHECK_EQ(mp_host_set_inline_bytes(kept), 5);
    kept = mp_host_set_stream_bytes(6);
    CHECK_EQ(kept, 24 << 20);
    CHECK_EQ(mp_host_set_stream_bytes(kept), 6);
    const char *fastest = mp_host_isa();
    CHECK_EQ(mp_host_set_isa("no such"), -1);
    CHECK_STR_EQ(mp_host_isa(), fastest);
    CHECK_EQ(mp_host_set_isa("scalar"), 0);
    CHECK_STR_EQ(mp_host_isa(), "scalar");
    CHECK_EQ(mp_host_set_isa(NULL), 0);
    CHECK_STR_EQ(mp_host_isa(), fastest);
}

/* Rows of every size around the pieces, each with room around it that must stay as it is. */
static void
fill_pieces(mp_row *rows, size_t count, const float *src, uint16_t *dst)
{
    static const int64_t sizes[] = {1, 0, 511, 512, 513, 87381, 87382, 262144, 0, 3, 300001, 7, 1000003, 0};
    for (size_t i = 0; i < count; i++) {
        rows[i] = cast_row(src, dst + 8, i < 14 ? sizes[i] : (int64_t)(i % 300));
        src += rows[i].numel;
        dst += rows[i].numel + 16;
    }
}

static void
test_pieces(void)
{
    enum { ROWS = 4000, SOURCES = 3 << 20, TARGETS = SOURCES + 16 * ROWS };
    static mp_row rows[ROWS];
    float *src = floats(SOURCES, 0);
    uint16_t *expected = malloc(TARGETS * sizeof(*expected)), *dst = malloc(TARGETS * sizeof(*dst));
    for (size_t i = 0; i < SOURCES; i++) {
        src[i] = (float)(i * 2654435761u % 100003) - 5e4f;
    }
    memset(expected, 0x5a, TARGETS * sizeof(*expected));
    fill_pieces(rows, ROWS, src, expected);
    OK(backend->launch_on(device, rows, ROWS, 1, NULL, &error)); /* in one go */
    fill_pieces(rows, ROWS, src, dst);
    mp_event *event = event_new();
    size_t kept = mp_host_set_stream_bytes(SIZE_MAX);
    for (int round = 0; round < 6; round++) {
        memset(dst, 0x5a, TARGETS * sizeof(*dst));
        mp_host_set_stream_bytes(round & 1 ? 0 : SIZE_MAX);
        OK(backend->launch(device, rows, ROWS, 1, &error));
        OK(backend->event_record(event, &error));
        while (round < 2 && !is_done(event)) { /* the worker alone */
            nap(1);
        }
        OK(backend->event_wait(event, NULL, &error)); /* or with this thread's help */
        CHECK(memcmp(expected, dst, TARGETS * sizeof(*dst)) == 0);
    }
    mp_host_set_stream_bytes(kept);
    backend->event_put(event);
    free(dst);
    free(expected);
    free(src);
}

/* torch.set_flush_denormal on the calling thread changes no bit of a conversion, here or on the worker. */
static void
test_subnormals_survive_flushing(void)
{
#ifdef __SSE2__
    float tiny = 1e-40f, sum[2] = {0}, zero = 0;
    for (size_t i = 0; i < 2; i++) {
        mp_row row = {.src = &tiny, .add = &zero, .dst = &sum[i], .numel = 1, .src_dtype = MP_F32,
                      .add_dtype = MP_F32, .dst_dtype = MP_F32};
            size_t kept = mp_host_set_inline_bytes(i == 0 ? SIZE_MAX : 0);
        unsigned control = _mm_getcsr();
        _mm_setcsr(control | 0x8040);
        OK(backend->launch(device, &row, 1, 1, &error));
        OK(backend->synchronize(device, &error));
        CHECK_EQ(_mm_getcsr() & 0x8040, 0x8040);
        _mm_setcsr(control);
        mp_host_set_inline_bytes(kept);
        CHECK(memcmp(&sum[i], &tiny, sizeof(tiny)) == 0);
        }
#endif
}

/* --- a worker that is held --- */

typedef struct waiter {
    mp_event *event; /* NULL: the device */
    atomic_int started, returned;
    mp_status status;
} waiter;

static void *
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

/* --- many threads --- */

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

/* --- fork --- */

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

/* --- failure --- */

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

/* --- the end of the process --- */

/* The program again, in the mode `how`; it must come to its end in good order. */
static void
check_exit(const char *how)
{
    fflush(stderr);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_host", how, (char *)NULL);
        _exit(99);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

static int
exit_with_pending_work(int held)
{
    enum { LONG = 4000000 };
    static float values[LONG], one[LONG];
    static gate gate;
    mp_row row = add_row(values, one, LONG);
    if (held) {
        gate_close(&gate);
    }
    for (int i = 0; i < 50; i++) {
        OK(backend->launch(device, &row, 1, 1, &error));
    }
    if (held) {
        gate_wait_entered(&gate);
    }
    return check_failures != 0;
}

/* --- figures --- */

static double
microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int
ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median time of a launch and, with `wait`, of waiting for it, `pause` ms after the one before. */
static double
measure_launch(const mp_row *row, int wait, long pause)
{
    enum { TIMES = 101 };
    double times[TIMES];
    mp_event *event = event_new();
    for (size_t i = 0; i < TIMES; i++) {
        nap(pause);
        double begin = microseconds();
        OK(backend->launch(device, row, 1, 1, &error));
        OK(backend->event_record(event, &error));
        if (wait) {
            OK(backend->event_wait(event, NULL, &error));
        }
        times[i] = microseconds() - begin;
        OK(backend->synchronize(device, &error));
    }
    backend->event_put(event);
    qsort(times, TIMES, sizeof(times[0]), ascending);
    return times[TIMES / 2];
}

static int
measure(void)
{
    enum { MOST = 128 << 20 };
    float *src = floats(MOST / 4, 1);
    uint16_t *dst = malloc(MOST / 2);
    memset(dst, 0, MOST / 2);
    printf("float32 -> bfloat16, %s, median us\n", mp_host_isa());
    printf("%10s %10s %14s %14s %14s\n", "KiB moved", "at once", "launch, asleep", "launch + wait", "non-temporal");
    for (size_t bytes = 3 << 10; bytes / 3 * 2 <= MOST; bytes *= 2) {
        mp_row row = cast_row(src, dst, (int64_t)(bytes / 6));
        mp_host_set_stream_bytes(SIZE_MAX);
        mp_host_set_inline_bytes(SIZE_MAX);
        double at_once = measure_launch(&row, 0, 0);
        mp_host_set_inline_bytes(0);
        double launch = measure_launch(&row, 0, 1);
        double waited = measure_launch(&row, 1, 0);
        mp_host_set_stream_bytes(0);
        double streamed = measure_launch(&row, 1, 0);
        printf("%10zu %10.1f %14.1f %14.1f %14.1f\n", bytes >> 10, at_once, launch, waited, streamed);
    }
    free(dst);
    free(src);
    return check_status();
}

int
main(int argc, char **argv)
{
    alarm(240); /* a hang is a failure too */
    OK(backend->open(0, &device, &error));
    if (argc > 1) {
        return strcmp(argv[1], "measure") == 0 ? measure() : exit_with_pending_work(strcmp(argv[1], "held") == 0);
    }
    test_device();
    test_error_text();
    test_knobs();
    test_events();
    test_rows();
    test_counters();
    test_pieces();
    test_subnormals_survive_flushing();
    test_wait_blocks_until_released();
    test_record_again_while_waiting();
    test_rows_change_while_pending();
    test_probe_removed_while_held();
    test_producers();
    test_launch_behind_a_run_at_once();
    test_fork_in_the_middle();
    test_fork_while_held();
    test_fork_while_others_launch();
    test_every_entry_fails_on_request();
    test_failed_launch_runs_nothing();
    test_memory_out();
    check_exit("busy");
    check_exit("held");
    return check_status();
}
