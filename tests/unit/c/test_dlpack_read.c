/* Tests of core/dlpack.c and view.c: what is read of a description, and which descriptions are refused.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *     tests/unit/c/test_dlpack_read.c csrc/core/dlpack.c csrc/core/view.c -o test_dlpack_read
 */
#include "check.h"
#include "core/dlpack.h"

static double memory[64];

/* A float32 description; the arrays are the caller's. */
static dl_tensor
described(int ndim, int64_t *shape, int64_t *strides)
{
    return (dl_tensor){
        .data = memory,
        .device = {DL_CPU, 0},
        .ndim = ndim,
        .dtype = {DL_FLOAT, 32, 1},
        .shape = shape,
        .strides = strides,
    };
}

static void
check_refused(const dl_tensor *tensor, const char *text)
{
    mp_view view;
    const char *whole = mp_dlpack_read(tensor, 1, &view), *part = mp_dlpack_read(tensor, 0, &view);
    CHECK(whole != NULL && strstr(whole, text) != NULL);
    CHECK_STR_EQ(whole, part);
}

static void
test_facts(void)
{
    int64_t shape[] = {2, 3}, strides[] = {3, 1};
    dl_tensor tensor = described(2, shape, strides);
    mp_view view;
    tensor.device = (dl_device){DL_CUDA, 5};
    tensor.byte_offset = 8;
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ((uintptr_t)view.data, (uintptr_t)memory + 8);
    CHECK_EQ(view.numel, 6);
    CHECK_EQ(view.dtype, MP_F32);
    CHECK_EQ(view.layout, MP_LAYOUT_DENSE);
    CHECK(mp_view_same_device(&view, 2, 5));
    CHECK(!mp_view_same_device(&view, 2, 4));
    CHECK(!mp_view_same_device(&view, 1, 5));
    CHECK_EQ(view.ndim, 2);
    CHECK_EQ(view.shape[1], 3);
    CHECK_EQ(view.strides[0], 3);
}

/* The hot path leaves what it does not read as it was. */
static void
test_facts_alone(void)
{
    int64_t shape[] = {4}, strides[] = {2};
    dl_tensor tensor = described(1, shape, strides);
    mp_view view = {.layout = MP_LAYOUT_DENSE, .ndim = 7, .shape = {9}, .strides = {9}};
    CHECK(mp_dlpack_read(&tensor, 0, &view) == NULL);
    CHECK_EQ(view.numel, 4);
    CHECK_EQ(view.layout, MP_LAYOUT_DENSE);
    CHECK_EQ(view.ndim, 7);
    CHECK_EQ(view.shape[0], 9);
    CHECK_EQ(view.strides[0], 9);
}

static void
test_every_dtype(void)
{
    int64_t shape[] = {1};
    for (unsigned code = 0; code < 256; code++) {
        for (unsigned bits = 0; bits < 256; bits++) {
            for (uint16_t lanes = 0; lanes < 3; lanes++) {
                mp_dtype due = MP_DTYPE_NONE;
                if (lanes == 1 && code == DL_FLOAT) {
                    due = bits == 64 ? MP_F64 : bits == 32 ? MP_F32 : bits == 16 ? MP_F16 : MP_DTYPE_NONE;
                }
                else if (lanes == 1 && code == DL_BFLOAT && bits == 16) {
                    due = MP_BF16;
                }
                mp_view view;
                dl_tensor tensor = described(1, shape, NULL);
                tensor.dtype = (dl_dtype){(uint8_t)code, (uint8_t)bits, lanes};
                CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
                CHECK_EQ(view.dtype, due);
            }
        }
    }
}

static void
test_refused(void)
{
    int64_t shape[MP_MAX_NDIM + 1], two[] = {2}, negative[] = {2, -1}, large[] = {INT64_C(1) << 32, INT64_C(1) << 31};
    for (int i = 0; i <= MP_MAX_NDIM; i++) {
        shape[i] = 1;
    }
    dl_tensor tensor = described(MP_MAX_NDIM + 1, shape, NULL);
    check_refused(&tensor, "more dimensions");
    tensor.ndim = -1;
    check_refused(&tensor, "more dimensions");
    tensor = described(1, NULL, NULL);
    check_refused(&tensor, "no shape");
    tensor = described(2, negative, NULL);
    check_refused(&tensor, "negative size");
    tensor = described(2, large, NULL); /* 2^63 elements */
    check_refused(&tensor, "63 bits");
    large[1] = INT64_C(1) << 30; /* 2^62 elements of 4 bytes */
    check_refused(&tensor, "63 bits");
    tensor = described(1, two, NULL);
    tensor.data = NULL;
    check_refused(&tensor, "no memory");
    tensor = described(1, two, NULL);
    tensor.byte_offset = UINT64_MAX - 7;
    check_refused(&tensor, "byte offset");
    tensor = described(1, two, NULL);
    tensor.byte_offset = 2;
    check_refused(&tensor, "not aligned");
}

static void
test_accepted_at_the_limits(void)
{
    int64_t shape[MP_MAX_NDIM], large[] = {INT64_C(1) << 32, INT64_C(1) << 28}, empty[] = {INT64_MAX, INT64_MAX, 0};
    mp_view view;
    for (int i = 0; i < MP_MAX_NDIM; i++) {
        shape[i] = 1;
    }
    dl_tensor tensor = described(MP_MAX_NDIM, shape, NULL);
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ(view.strides[0], 1);
    tensor = described(0, NULL, NULL);
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ(view.numel, 1);
    CHECK_EQ(view.layout, MP_LAYOUT_DENSE);
    tensor = described(2, large, NULL); /* 2^62 bytes */
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ(view.numel, INT64_C(1) << 60);
    CHECK_EQ(view.layout, MP_LAYOUT_DENSE);
    /* Empty: neither sizes that overflow, nor missing memory, nor an odd offset matter. */
    tensor = described(3, empty, NULL);
    tensor.data = NULL;
    tensor.byte_offset = 3;
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ(view.numel, 0);
    CHECK(view.data == NULL);
    CHECK_EQ(view.layout, MP_LAYOUT_DENSE);
}

static void
test_extreme_strides(void)
{
    int64_t shape[] = {2, 1, 3}, strides[] = {INT64_MIN, INT64_MAX, INT64_MAX};
    dl_tensor tensor = described(3, shape, strides);
    mp_view view;
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    CHECK_EQ(view.layout, MP_LAYOUT_OTHER);
    CHECK_EQ(view.strides[0], INT64_MIN);
    CHECK_EQ(view.strides[1], 1); /* what would be there does not fit */
}

/* Whether the elements' offsets are 0, 1, ..., numel - 1 in some order: by enumeration. */
static int
is_dense(const int64_t *shape, const int64_t *strides)
{
    char seen[64] = {0};
    for (int64_t i = 0; i < shape[0]; i++) {
        for (int64_t j = 0; j < shape[1]; j++) {
            for (int64_t k = 0; k < shape[2]; k++) {
                int64_t offset = i * strides[0] + j * strides[1] + k * strides[2];
                if (offset < 0 || offset >= shape[0] * shape[1] * shape[2] || seen[offset]++) {
                    return 0;
                }
            }
        }
    }
    return 1;
}

static void
test_layout_of_every_small_tensor(void)
{
    enum { SIZES = 4, STRIDES = 10 };
    for (int64_t at = 0; at < SIZES * SIZES * SIZES * STRIDES * STRIDES * STRIDES; at++) {
        int64_t rest = at, shape[3], strides[3];
        for (int i = 0; i < 3; i++, rest /= SIZES) {
            shape[i] = rest % SIZES;
        }
        for (int i = 0; i < 3; i++, rest /= STRIDES) {
            strides[i] = rest % STRIDES - 1;
        }
        dl_tensor tensor = described(3, shape, strides);
        mp_view view;
        CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
        CHECK_EQ(view.layout == MP_LAYOUT_DENSE, view.numel <= 1 || is_dense(shape, strides));
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(view.shape[i], shape[i]);
            CHECK_EQ(view.strides[i], shape[i] != 1 ? strides[i] : i == 2 ? 1
                                                   : view.strides[i + 1] * (shape[i + 1] > 0 ? shape[i + 1] : 1));
        }
    }
}

static mp_view
viewed(int64_t first, int64_t second, int64_t *strides)
{
    int64_t shape[] = {first, second};
    dl_tensor tensor = described(2, shape, strides);
    mp_view view;
    CHECK(mp_dlpack_read(&tensor, 1, &view) == NULL);
    return view;
}

static void
check_compared(const mp_view *a, const mp_view *b, int same_shape, int same_layout)
{
    CHECK_EQ(mp_view_same_shape(a, b), same_shape);
    CHECK_EQ(mp_view_same_layout(a, b), same_layout);
    CHECK_EQ(mp_view_layout_key(a) == mp_view_layout_key(b), same_layout);
}

static void
test_views_compare(void)
{
    int64_t row_major[] = {3, 1}, column_major[] = {1, 2}, odd[] = {7, 1};
    mp_view plain = viewed(2, 3, NULL), same = viewed(2, 3, row_major), turned = viewed(2, 3, column_major);
    mp_view other = viewed(3, 2, NULL), flat = plain;
    flat.ndim = 1;
    check_compared(&plain, &same, 1, 1);
    check_compared(&plain, &turned, 1, 0);
    check_compared(&plain, &other, 0, 0);
    CHECK(!mp_view_same_shape(&plain, &flat));
    mp_view line = viewed(1, 3, NULL), stepped = viewed(1, 3, odd);
    check_compared(&line, &stepped, 1, 1); /* never stepped along */
    mp_view none = viewed(0, 3, NULL), nothing = viewed(0, 3, column_major);
    check_compared(&none, &nothing, 1, 1); /* no element to step to */
}

static void
check_type(dl_dtype type, const char *due)
{
    char text[MP_TYPE_TEXT];
    int64_t shape[] = {0};
    dl_tensor tensor = described(1, shape, NULL);
    mp_view view;
    tensor.dtype = type;
    CHECK(mp_dlpack_read(&tensor, 0, &view) == NULL);
    CHECK_STR_EQ(mp_view_type(&view, text), due);
}

static void
test_type_in_words(void)
{
    check_type((dl_dtype){DL_INT, 64, 1}, "int64");
    check_type((dl_dtype){DL_UINT, 8, 1}, "uint8");
    check_type((dl_dtype){DL_FLOAT, 32, 1}, "float32");
    check_type((dl_dtype){DL_BFLOAT, 16, 1}, "bfloat16");
    check_type((dl_dtype){DL_COMPLEX, 64, 1}, "complex64");
    check_type((dl_dtype){DL_BOOL, 8, 1}, "bool");
    check_type((dl_dtype){10, 8, 1}, "DLPack type 10 of 8 bits, 1 lanes"); /* float8_e4m3fn */
    check_type((dl_dtype){3, 64, 1}, "DLPack type 3 of 64 bits, 1 lanes"); /* an opaque handle: no kind has its number */
    check_type((dl_dtype){255, 255, 65535}, "DLPack type 255 of 255 bits, 65535 lanes");
    check_type((dl_dtype){DL_FLOAT, 32, 4}, "DLPack type 2 of 32 bits, 4 lanes");
}

int
main(void)
{
    test_facts();
    test_facts_alone();
    test_every_dtype();
    test_refused();
    test_accepted_at_the_limits();
    test_extreme_strides();
    test_layout_of_every_small_tensor();
    test_views_compare();
    test_type_in_words();
    return check_status();
}
