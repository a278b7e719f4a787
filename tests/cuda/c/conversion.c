/* Conversion on the device, bit for bit as on the host, and the rows that are refused. */
#include <math.h>
#include <stdlib.h>

#include "cuda/launch.h"
#include "host/convert.h"
#include "rig.h"
#include "tests.h"

static uint64_t
next(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Random bits, or a value of moderate size rounded to the type. */
static void
fill(unsigned char *to, int64_t count, mp_dtype type)
{
    for (int64_t i = 0; i < count; i++, to += mp_dtype_size(type)) {
        const uint64_t bits = next();
        const double value = ldexp((double)(int64_t)next(), (int)(next() % 60) - 90);
        if (bits % 3 == 0) {
            memcpy(to, &bits, mp_dtype_size(type));
        }
        else {
            mp_cast_select("scalar")->cast[MP_F64][type](&value, to, 1);
        }
    }
}

static int
same_value(const unsigned char *a, const unsigned char *b, mp_dtype type)
{
    double x, y;
    mp_cast_select("scalar")->cast[type][MP_F64](a, &x, 1);
    mp_cast_select("scalar")->cast[type][MP_F64](b, &y, 1);
    return memcmp(a, b, mp_dtype_size(type)) == 0 || (isnan(x) && isnan(y));
}

/* A random row with guards around its destination, and the same row for the host. */
typedef struct trial {
    mp_row row, host;
    unsigned char *src, *add, *dst, *host_dst;
    size_t room;
} trial;

static unsigned char *
place(unsigned char **memory, size_t room, mp_dtype type, uint64_t offset)
{
    *memory = device_memory(room, "row");
    return *memory + (1 + offset) * mp_dtype_size(type);
}

static void
trial_init(trial *t)
{
    const int64_t numel = (int64_t)(next() % 6 == 0 ? 0 : next() % 3 == 0 ? next() % 3000 : next() % 70);
    const mp_dtype src = (mp_dtype)(next() % 4), add = (mp_dtype)(next() % 4), dst = (mp_dtype)(next() % 4);
    const uint64_t kind = next() % 5, offset = next() % 18;
    t->room = ((size_t)numel + 40) * 8;
    unsigned char *a = place(&t->src, t->room, src, next() % 18), *b = place(&t->add, t->room, add, next() % 18);
    unsigned char *c = place(&t->dst, t->room, dst, offset), *d = place(&t->host_dst, t->room, dst, offset);
    fill(a, numel, src);
    fill(b, numel, add);
    t->row = (mp_row){a, kind < 2 ? NULL : b, c, numel, src, add, dst};
    t->host = t->row;
    t->host.dst = d;
    if (kind == 3) { /* the source is the destination */
        fill(c, numel, dst);
        memcpy(d, c, (size_t)numel * mp_dtype_size(dst));
        t->row.src = c;
        t->host.src = d;
        t->row.src_dtype = t->host.src_dtype = dst;
    }
    else if (kind == 4) {
        t->row.src = t->host.src = NULL;
    }
}

static void
trial_check(trial *t, double divisor)
{
    const size_t size = mp_dtype_size(t->row.dst_dtype);
    const unsigned char *got = t->row.dst, *want = t->host.dst;
    mp_row_run(mp_cast_select("scalar"), &t->host, 0, t->host.numel, divisor, 0);
    for (int64_t i = 0; i < t->row.numel; i++) {
        CHECK(same_value(got + (size_t)i * size, want + (size_t)i * size, t->row.dst_dtype));
    }
    const size_t before = (size_t)(got - t->dst), after = before + (size_t)t->row.numel * size;
    for (size_t i = 0; i < t->room; i++) {
        CHECK((i >= before && i < after) || t->dst[i] == 0xA5);
    }
    release(t->src);
    release(t->add);
    release(t->dst);
    release(t->host_dst);
}

enum { MOST_ROWS = MP_CUDA_ROWS + 12 };

void
test_launch_converts_as_the_host(mp_device *on, int rounds)
{
    static const double divisors[] = {1,    1,       2,       3,        1024,    0.5,      -4,       7, 0.1,
                                      1e30, 8,       0x1p130, 0x1p-140, 0x1p126, 0x1p-126, -0x1p125};
    static trial trials[MOST_ROWS];
    static mp_row rows[MOST_ROWS];
    for (int round = 0; round < rounds; round++) {
        sim.begin(schedules[round % 4], (uint64_t)round);
        const size_t count = round % 20 == 19 ? MOST_ROWS : 1 + next() % 12; /* in two launches, and in one */
        const double divisor = divisors[next() % (sizeof divisors / sizeof *divisors)];
        for (size_t i = 0; i < count; i++) {
            trial_init(&trials[i]);
            sim.disown(trials[i].src), sim.own(trials[i].src, trials[i].room, "src", -1);
            sim.disown(trials[i].add), sim.own(trials[i].add, trials[i].room, "add", -1);
            sim.disown(trials[i].dst), sim.own(trials[i].dst, trials[i].room, "dst", -1);
            rows[i] = trials[i].row;
        }
        if (round % 2 == 0) {
            OK(backend->launch(on, rows, count, divisor, &error));
        }
        else {
            OK(backend->launch_on(on, rows, count, divisor, backend->native_stream(on), &error));
        }
        memset(rows, 0xff, count * sizeof *rows); /* borrowed for the call only */
        OK(backend->synchronize(on, &error));
        expect_clean();
        for (size_t i = 0; i < count; i++) {
            trial_check(&trials[i], divisor);
        }
    }
}

static void
test_launch_without_elements_calls_nothing(void)
{
    const mp_row empty[] = {{NULL, NULL, NULL, 0, MP_F32, MP_F32, MP_BF16},
                            {NULL, NULL, NULL, 0, MP_F64, MP_F64, MP_F16}};
    sim.begin(SIM_LAZY, 1);
    OK(backend->launch(device, NULL, 0, 1.0, &error));
    OK(backend->launch_on(device, NULL, 0, 1.0, NULL, &error));
    OK(backend->launch(device, empty, 2, 2.0, &error));
    CHECK_EQ(sim.calls("cuLaunchKernel"), 0);
}

static void
test_launch_refuses_bad_rows(void)
{
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const struct {
        mp_row row;
        const char *text;
    } cases[] = {
        {{f.master, NULL, f.low, -1, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, f.low, INT64_MAX, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, f.low, (int64_t)1 << 38, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, NULL, 8, MP_F32, MP_F32, MP_BF16}, "row 1: dst is NULL"},
        {{f.master, NULL, f.low, 8, MP_DTYPE_NONE, MP_F32, MP_BF16}, "row 1: src has an unknown type"},
        {{f.master, f.master, f.low, 8, MP_F32, MP_NDTYPE, MP_BF16}, "row 1: add has an unknown type"},
        {{f.master, NULL, f.low, 8, MP_F32, MP_F32, MP_NDTYPE}, "row 1: dst has an unknown type"},
        {{(char *)f.master + 2, NULL, f.low, 8, MP_F32, MP_F32, MP_BF16}, "row 1: src is not aligned to its elements"},
        {{NULL, (char *)f.master + 1, f.low, 8, MP_F32, MP_F16, MP_BF16}, "row 1: add is not aligned to its elements"},
        {{f.master, NULL, (char *)f.low + 1, 8, MP_F32, MP_F32, MP_BF16}, "row 1: dst is not aligned to its elements"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_row rows[] = {f.row, cases[i].row};
        CHECK_EQ(backend->launch(device, rows, 2, 1.0, &error), MP_ERR_ARGUMENT);
        CHECK_STR_EQ(error.text, cases[i].text);
        CHECK_EQ(backend->launch_on(device, rows, 2, 1.0, NULL, &error), MP_ERR_ARGUMENT);
    }
    CHECK_EQ(backend->launch(device, NULL, 3, 1.0, &error), MP_ERR_ARGUMENT);
    CHECK_EQ(sim.calls("*"), 0); /* of what is refused nothing is launched */
    OK(launch(&f));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(f.low[1], 0x3f80);
    fixture_fini(&f);
}

void
test_conversion(void)
{
    mp_device *second;
    OK(backend->open(1, &second, &error));
    test_launch_converts_as_the_host(device, 60);
    test_launch_converts_as_the_host(second, 60);
    test_launch_without_elements_calls_nothing();
    test_launch_refuses_bad_rows();
}
