/* What one thread can see: the device, errors, events, rows, counters, knobs, and that pieces make a whole. */
#include <stdlib.h>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "rig.h"
#include "tests.h"

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

void
test_backend(void)
{
    test_device();
    test_error_text();
    test_knobs();
    test_events();
    test_rows();
    test_counters();
    test_pieces();
    test_subnormals_survive_flushing();
}
