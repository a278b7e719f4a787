/* Conversion kernels, every instruction set that runs here, against exact arithmetic and against each other.
 *
 * Stands alone; from the top of the repository:
 *
 *     gcc -std=c11 -O2 -Wall -Wextra -Wconversion -Werror -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *         tests/unit/c/test_cast.c csrc/host/convert*.c -lm -o /tmp/test_cast && /tmp/test_cast
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host/convert.h"
#include "host/convert_kernel.h"
#include "check.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Tools ---- */

#define FOR_EACH_ISA(isa)                                                                                            \
    for (const mp_cast_isa *const *isa##_at = mp_cast_all(), *isa; (isa = *isa##_at) != NULL; isa##_at++)            \
        if (isa->usable())

static uint64_t random_state = 88172645463325252u;

/* Xorshift: the same bits in every run. */
static uint64_t
random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* Any bits at all: NaN, infinities and subnormals come up by themselves, most often in the halves. */
static void
fill_random(void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        ((unsigned char *)p)[i] = (unsigned char)(random_bits() >> 32);
    }
}

static float
float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t
bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* What a finite half, or the infinity after the largest, stands for; by definition, not by shifting bits about. */
static double
half_value(mp_dtype dtype, unsigned half)
{
    const int mantissa_bits = dtype == MP_BF16 ? 7 : 10;
    const int bias = dtype == MP_BF16 ? 127 : 15;
    const unsigned mantissa = half & ((1u << mantissa_bits) - 1);
    const int exponent = (int)((half & 0x7fff) >> mantissa_bits);
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == 0) {
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign * ldexp(mantissa + (double)(1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static unsigned
half_infinity(mp_dtype dtype)
{
    return dtype == MP_BF16 ? 0x7f80 : 0x7c00;
}

static unsigned
cast_to_half(const mp_cast_isa *isa, mp_dtype src_dtype, const void *src, mp_dtype dtype)
{
    uint16_t half = 0x1234;
    isa->cast[src_dtype][dtype](src, &half, 1);
    return half;
}

static int
is_nan(mp_dtype dtype, const char *p)
{
    double value;
    mp_cast_scalar.cast[dtype][MP_F64](p, &value, 1);
    return isnan(value);
}

/* Elements that differ; NaN results are equal whatever their bits when `any_nan`. */
static size_t
differences(mp_dtype dtype, const void *a, const void *b, size_t n, int any_nan)
{
    const size_t size = mp_dtype_size(dtype);
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const char *x = (const char *)a + i * size, *y = (const char *)b + i * size;
        count += memcmp(x, y, size) != 0 && !(any_nan && is_nan(dtype, x) && is_nan(dtype, y));
    }
    return count;
}

/* ---- Choosing ---- */

static void
test_select_name(void)
{
    CHECK(mp_cast_select("scalar") == &mp_cast_scalar);
    CHECK(mp_cast_select("altivec") == NULL);
    CHECK(mp_cast_select("") == NULL);
    CHECK(mp_cast_select(NULL) != NULL);
    const mp_cast_isa *fastest = NULL;
    FOR_EACH_ISA(isa)
    {
        fastest = fastest != NULL ? fastest : isa;
        CHECK(mp_cast_select(isa->name) == isa);
    }
    CHECK(mp_cast_select(NULL) == fastest);
}

static void
test_table_has_every_cast(void)
{
    FOR_EACH_ISA(isa)
    {
        for (int from = 0; from < MP_NDTYPE; from++) {
            for (int to = 0; to < MP_NDTYPE; to++) {
                CHECK(isa->cast[from][to] != NULL);
            }
        }
    }
}

/* ---- Values ---- */

static void
test_widening_is_exact(void)
{
    FOR_EACH_ISA(isa)
    {
        for (mp_dtype dtype = MP_BF16; dtype <= MP_F16; dtype++) {
            for (unsigned half = 0; half < 0x10000; half++) {
                const uint16_t src = (uint16_t)half;
                float narrow;
                double wide;
                isa->cast[dtype][MP_F32](&src, &narrow, 1);
                isa->cast[dtype][MP_F64](&src, &wide, 1);
                const unsigned magnitude = half & 0x7fff;
                if (magnitude > half_infinity(dtype)) {
                    CHECK(isnan(narrow) && isnan(wide));
                    continue;
                }
                const double sign = half & 0x8000 ? -1.0 : 1.0;
                const double value =
                    magnitude == half_infinity(dtype) ? sign * (double)INFINITY : half_value(dtype, half);
                CHECK(narrow == (float)value && !signbit(narrow) == !signbit(value));
                CHECK(wide == value && !signbit(wide) == !signbit(value));
                CHECK_EQ(cast_to_half(isa, MP_F32, &narrow, dtype), half);
                CHECK_EQ(cast_to_half(isa, MP_F64, &wide, dtype), half);
            }
        }
    }
}

/* Between every two neighbours: the midpoint goes to the even one, and one float to either side to the nearer.
 * The last pair ends in infinity, whose place in the number line is that of the next power of two. */
static void
test_rounding_goes_to_nearest_even(void)
{
    FOR_EACH_ISA(isa)
    {
        for (mp_dtype dtype = MP_BF16; dtype <= MP_F16; dtype++) {
            for (unsigned half = 0; half < half_infinity(dtype); half++) {
                const float middle = (float)((half_value(dtype, half) + half_value(dtype, half + 1)) / 2);
                const unsigned even = half + (half & 1);
                const float below = float_of(bits_of(middle) - 1), above = float_of(bits_of(middle) + 1);
                const float minus = -middle;
                CHECK_EQ(cast_to_half(isa, MP_F32, &middle, dtype), even);
                CHECK_EQ(cast_to_half(isa, MP_F32, &minus, dtype), even | 0x8000);
                CHECK_EQ(cast_to_half(isa, MP_F32, &below, dtype), half);
                CHECK_EQ(cast_to_half(isa, MP_F32, &above, dtype), half + 1);
                /* PyTorch rounds float64 to float first, so a nudge that a float cannot hold is lost. */
                const double nudged = nextafter((double)middle, (double)INFINITY);
                CHECK_EQ(cast_to_half(isa, MP_F64, &nudged, dtype), even);
            }
        }
    }
}

static void
test_special_values(void)
{
    static const struct {
        uint32_t f32;
        uint16_t bf16, f16;
    } cases[] = {
        {0x7f800001, 0xffff, 0x7e00}, /* signalling NaN */
        {0xff800001, 0xffff, 0xfe00},
        {0x7fffffff, 0xffff, 0x7fff}, /* NaN that a carry would turn into -0 */
        {0x7fff8c22, 0xffff, 0x7ffc},
        {0x7fc00000, 0xffff, 0x7e00},
        {0x7f7fffff, 0x7f80, 0x7c00}, /* the largest float overflows */
        {0xff7fffff, 0xff80, 0xfc00},
        {0x7f800000, 0x7f80, 0x7c00},
        {0x3f808000, 0x3f80, 0x3c04}, /* ties of bfloat16, to either side */
        {0x3f818000, 0x3f82, 0x3c0c},
        {0x00000001, 0x0000, 0x0000}, /* subnormals stay as far as they reach */
        {0x007fffff, 0x0080, 0x0000},
        {0x80018000, 0x8002, 0x8000},
        {0x33000000, 0x3300, 0x0000}, /* 2^-25, halfway to the smallest float16 */
        {0x33000001, 0x3300, 0x0001},
        {0x477fefff, 0x4780, 0x7bff}, /* just below, and at, the overflow of float16 */
        {0x477ff000, 0x4780, 0x7c00},
        {0x80000000, 0x8000, 0x8000},
    };
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < COUNT(cases); i++) {
            CHECK_EQ(cast_to_half(isa, MP_F32, &cases[i].f32, MP_BF16), cases[i].bf16);
            CHECK_EQ(cast_to_half(isa, MP_F32, &cases[i].f32, MP_F16), cases[i].f16);
        }
        const uint16_t f16_nan = 0xfc01;
        CHECK_EQ(cast_to_half(isa, MP_F16, &f16_nan, MP_BF16), 0x7fc0);
        const double too_large = 1e300, too_small = -1e-300;
        CHECK_EQ(cast_to_half(isa, MP_F64, &too_large, MP_BF16), 0x7f80);
        CHECK_EQ(cast_to_half(isa, MP_F64, &too_small, MP_F16), 0x8000);
    }
}

/* ---- Loops ---- */

#define MAX_COUNT 130
#define MAX_OFFSET 18
#define GUARD 0xa5

/* One call at any place, length and kind of store: the elements are right and nothing else is written.  The memory
 * comes from the heap in its exact size, so that the address sanitizer sees a read beyond it. */
static void
check_cast_at(const mp_cast_isa *isa, mp_dtype from, mp_dtype to, mp_cast_fn cast, size_t offset, size_t n)
{
    const size_t src_size = mp_dtype_size(from), dst_size = mp_dtype_size(to);
    const size_t src_offset = offset % 5, dst_offset = offset;
    char *src = calloc(src_offset + n, src_size);
    char *dst = calloc(dst_offset + n + 1, dst_size);
    char expected[MAX_COUNT * 8];
    fill_random(src, (src_offset + n) * src_size);
    memset(dst, GUARD, (dst_offset + n + 1) * dst_size);
    mp_cast_scalar.cast[from][to](src + src_offset * src_size, expected, n);
    cast(src + src_offset * src_size, dst + dst_offset * dst_size, n);
    const size_t wrong = differences(to, dst + dst_offset * dst_size, expected, n, 0);
    size_t touched = 0;
    for (size_t i = 0; i < (dst_offset + n + 1) * dst_size; i++) {
        const int inside = i >= dst_offset * dst_size && i < (dst_offset + n) * dst_size;
        touched += !inside && (unsigned char)dst[i] != GUARD;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(touched, 0);
    if (wrong + touched > 0) {
        fprintf(stderr, "  %s %s -> %s, offset %zu, n %zu\n", isa->name, mp_dtype_name(from), mp_dtype_name(to),
                offset, n);
    }
    free(src);
    free(dst);
}

static void
test_every_length_and_offset(void)
{
    FOR_EACH_ISA(isa)
    {
        for (mp_dtype from = MP_F64; from < MP_NDTYPE; from++) {
            for (mp_dtype to = MP_F64; to < MP_NDTYPE; to++) {
                for (size_t n = 0; n <= MAX_COUNT; n++) {
                    for (size_t offset = 0; offset < MAX_OFFSET; offset++) {
                        check_cast_at(isa, from, to, isa->cast[from][to], offset, n);
                        if (isa->stream[from][to] != NULL) {
                            check_cast_at(isa, from, to, isa->stream[from][to], offset, n);
                        }
                    }
                }
            }
        }
    }
}

static void
test_cast_in_place(void)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t n = 0; n <= MAX_COUNT; n++) {
            uint16_t data[MAX_COUNT], expected[MAX_COUNT];
            fill_random(data, sizeof data);
            mp_cast_scalar.cast[MP_BF16][MP_F16](data, expected, n);
            isa->cast[MP_BF16][MP_F16](data, data, n);
            CHECK_EQ(differences(MP_F16, data, expected, n, 0), 0);
        }
    }
}

/* ---- The formula ---- */

/* row.h read aloud, one element at a time.  Scalar casts only move values between types here; the test of those
 * is above. */
static void
expect_fuse(const mp_row *row, double divisor, void *dst)
{
    const int as_double = (row->src != NULL && row->src_dtype == MP_F64) ||
                          (row->add != NULL && row->add_dtype == MP_F64) || row->dst_dtype == MP_F64;
    const mp_dtype wide = as_double ? MP_F64 : MP_F32;
    for (size_t i = 0; i < (size_t)row->numel; i++) {
        double a = 0.0, b = 0.0;
        if (row->src != NULL) {
            const char *p = (const char *)row->src + i * mp_dtype_size(row->src_dtype);
            mp_cast_scalar.cast[row->src_dtype][MP_F64](p, &a, 1);
        }
        if (row->add != NULL) {
            const char *p = (const char *)row->add + i * mp_dtype_size(row->add_dtype);
            mp_cast_scalar.cast[row->add_dtype][MP_F64](p, &b, 1);
        }
        double as_f64 = row->add != NULL ? a + b : a;
        float as_f32 = row->add != NULL ? (float)a + (float)b : (float)a;
        if (divisor != 1.0) {
            as_f64 /= divisor;
            as_f32 /= (float)divisor;
        }
        char *out = (char *)dst + i * mp_dtype_size(row->dst_dtype);
        mp_cast_scalar.cast[wide][row->dst_dtype](as_double ? (void *)&as_f64 : (void *)&as_f32, out, 1);
    }
}

static void
check_fuse(const mp_cast_isa *isa, const mp_row *row, double divisor)
{
    const size_t bytes = (size_t)row->numel * mp_dtype_size(row->dst_dtype);
    char *expected = malloc(bytes + 1);
    expect_fuse(row, divisor, expected);
    mp_row_run(isa, row, 0, row->numel, divisor, 0);
    const size_t by_row = differences(row->dst_dtype, row->dst, expected, (size_t)row->numel, 1);
    mp_fuse_generic(isa, row, divisor);
    const size_t by_generic = differences(row->dst_dtype, row->dst, expected, (size_t)row->numel, 1);
    CHECK_EQ(by_row, 0);
    CHECK_EQ(by_generic, 0);
    if (by_row + by_generic > 0) {
        fprintf(stderr, "  %s (%s + %s) / %g -> %s\n", isa->name, mp_dtype_name(row->src_dtype),
                mp_dtype_name(row->add_dtype), divisor, mp_dtype_name(row->dst_dtype));
    }
    free(expected);
}

/* More than one block of the generic path, and a tail. */
#define FUSE_COUNT 1061

static void
test_fuse_every_triple(void)
{
    static const double divisors[] = {1.0,     2.0,      3.0,     8.0,       0.75,    -4.0,
                                      0x1p126, 0x1p-126, 0x1p127, 0x1p-127, 0x1p140, 0x1p-140};
    static char src[FUSE_COUNT * 8], add[FUSE_COUNT * 8], dst[FUSE_COUNT * 8];
    FOR_EACH_ISA(isa)
    {
        for (int from = MP_DTYPE_NONE; from < MP_NDTYPE; from++) {
            for (int with = MP_DTYPE_NONE; with < MP_NDTYPE; with++) {
                for (int to = 0; to < MP_NDTYPE; to++) {
                    for (size_t i = 0; i < COUNT(divisors); i++) {
                        fill_random(src, sizeof src);
                        fill_random(add, sizeof add);
                        const mp_row row = {
                            .src = from == MP_DTYPE_NONE ? NULL : src,
                            .add = with == MP_DTYPE_NONE ? NULL : add,
                            .dst = dst,
                            .numel = FUSE_COUNT,
                            .src_dtype = (mp_dtype)from,
                            .add_dtype = (mp_dtype)with,
                            .dst_dtype = (mp_dtype)to,
                        };
                        check_fuse(isa, &row, divisors[i]);
                    }
                }
            }
        }
    }
}

/* A gradient is accumulated where it lies: src or add is dst itself. */
static void
test_fuse_in_place(void)
{
    FOR_EACH_ISA(isa)
    {
        for (int64_t n = 0; n <= MAX_COUNT; n++) {
            uint16_t low[MAX_COUNT];
            float full[MAX_COUNT], expected[MAX_COUNT];
            fill_random(low, sizeof low);
            fill_random(full, sizeof full);
            const mp_row onto_add = {low, full, full, n, MP_BF16, MP_F32, MP_F32};
            expect_fuse(&onto_add, 3.0, expected);
            mp_row_run(isa, &onto_add, 0, n, 3.0, 0);
            CHECK_EQ(differences(MP_F32, full, expected, (size_t)n, 1), 0);
            const mp_row onto_src = {full, NULL, full, n, MP_F32, MP_DTYPE_NONE, MP_F32};
            expect_fuse(&onto_src, 2.0, expected);
            mp_row_run(isa, &onto_src, 0, n, 2.0, 0);
            CHECK_EQ(differences(MP_F32, full, expected, (size_t)n, 1), 0);
        }
    }
}

/* ---- Rows ---- */

static void
test_row_range_leaves_the_rest(void)
{
    float src[64];
    uint16_t dst[64], whole[64];
    fill_random(src, sizeof src);
    mp_cast_scalar.cast[MP_F32][MP_BF16](src, whole, 64);
    FOR_EACH_ISA(isa)
    {
        const mp_row row = {src, NULL, dst, 64, MP_F32, MP_DTYPE_NONE, MP_BF16};
        memset(dst, GUARD, sizeof dst);
        mp_row_run(isa, &row, 5, 41, 1.0, 0);
        for (size_t i = 0; i < 64; i++) {
            CHECK_EQ(dst[i], i >= 5 && i < 41 ? whole[i] : GUARD << 8 | GUARD);
        }
    }
}

static void
test_row_empty_touches_nothing(void)
{
    const mp_row row = {NULL, NULL, NULL, 0, MP_F32, MP_DTYPE_NONE, MP_BF16};
    FOR_EACH_ISA(isa)
    {
        mp_row_run(isa, &row, 0, 0, 1.0, 0);
        mp_row_run(isa, &row, 0, 0, 2.0, 1);
    }
}

static void
test_row_without_operands_is_zero(void)
{
    FOR_EACH_ISA(isa)
    {
        for (int i = 0; i < 2; i++) {
            float dst[9];
            memset(dst, GUARD, sizeof dst);
            const mp_row row = {NULL, NULL, dst, 9, MP_DTYPE_NONE, MP_DTYPE_NONE, MP_F32};
            mp_row_run(isa, &row, 0, 9, i == 0 ? 1.0 : 2.0, 0);
            for (size_t k = 0; k < 9; k++) {
                CHECK_EQ(bits_of(dst[k]), 0);
            }
        }
    }
}

/* Large enough for non-temporal stores, which mp_row_run leaves out below a page. */
static void
test_row_stream_equals_cast(void)
{
    enum { N = 10007 };
    float *src = malloc(N * sizeof *src);
    uint16_t *dst = malloc((N + 1) * sizeof *dst), *expected = malloc(N * sizeof *expected);
    fill_random(src, N * sizeof *src);
    mp_cast_scalar.cast[MP_F32][MP_F16](src, expected, N);
    FOR_EACH_ISA(isa)
    {
        const mp_row row = {src, NULL, dst + 1, N, MP_F32, MP_DTYPE_NONE, MP_F16};
        mp_row_run(isa, &row, 0, N, 1.0, 1);
        CHECK_EQ(differences(MP_F16, dst + 1, expected, N, 0), 0);
    }
    free(src);
    free(dst);
    free(expected);
}

int
main(void)
{
    test_select_name();
    test_table_has_every_cast();
    test_widening_is_exact();
    test_rounding_goes_to_nearest_even();
    test_special_values();
    test_every_length_and_offset();
    test_cast_in_place();
    test_fuse_every_triple();
    test_fuse_in_place();
    test_row_range_leaves_the_rest();
    test_row_empty_touches_nothing();
    test_row_without_operands_is_zero();
    test_row_stream_equals_cast();
    return check_status();
}
