/* Tests of plan.c: where rows go, sizes beyond 32 bits, refusals.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *     tests/unit/c/test_plan.c tests/kit/c/check.c csrc/core/plan.c \
 *     -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -o test_plan
 */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "malloc_fault.h"
#include "core/plan.h"

#define MIB ((int64_t)1 << 20)
#define GIB ((int64_t)1 << 30)

/* What plan.h promises about every plan, computed again from the element counts. */
static void
check_plan(const mp_plan *plan, const int64_t *numels, size_t count, int64_t first_limit, int64_t limit)
{
    mp_plan_check(plan);
    CHECK_EQ(plan->row_count, count);
    int64_t element = (int64_t)mp_dtype_size(plan->low);
    size_t next = 0;
    for (size_t b = 0; b < plan->bucket_count; b++) {
        const mp_plan_bucket *bucket = &plan->buckets[b];
        int64_t end = 0, used = 0;
        size_t filled = 0;
        CHECK_EQ(bucket->first, next);
        for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
            const mp_plan_row *row = &plan->rows[i];
            CHECK_EQ(row->numel, numels[i]);
            CHECK_EQ(row->bytes, numels[i] * element);
            CHECK_EQ(row->bucket, b);
            CHECK_EQ(row->offset, end);
            CHECK_EQ(row->offset % MP_ROW_ALIGN, 0);
            used = row->bytes > 0 ? row->offset + row->bytes : used;
            filled += row->bytes > 0;
            end = row->offset + (row->bytes + (MP_ROW_ALIGN - 1)) / MP_ROW_ALIGN * MP_ROW_ALIGN;
        }
        CHECK_EQ(bucket->bytes, end);
        CHECK(filled <= 1 || used <= (b == 0 ? first_limit : limit));
        if (b > 0) { /* a bucket is closed only because the next row does not fit */
            const mp_plan_bucket *before = bucket - 1;
            const mp_plan_row *row = &plan->rows[bucket->first];
            CHECK(row->bytes > 0);
            CHECK(before->bytes > 0);
            CHECK(row->bytes > (b == 1 ? first_limit : limit) - before->bytes);
        }
        next += bucket->count;
    }
    CHECK_EQ(next, count);
}

static void
check_built(const int64_t *numels, size_t count, mp_dtype low, int64_t first_limit, int64_t limit,
            size_t bucket_count)
{
    mp_plan plan;
    CHECK_EQ(mp_plan_init(&plan, numels, count, low, first_limit, limit), MP_PLAN_OK);
    check_plan(&plan, numels, count, first_limit, limit);
    CHECK_EQ(plan.bucket_count, bucket_count);
    mp_plan_fini(&plan);
    mp_plan_fini(&plan); /* always safe */
    CHECK(plan.rows == NULL && plan.buckets == NULL && plan.row_count == 0 && plan.bucket_count == 0);
}

static void
check_refused(const int64_t *numels, size_t count, mp_dtype low, int64_t first_limit, int64_t limit,
              mp_plan_status status)
{
    mp_plan plan;
    memset(&plan, 0xaa, sizeof(plan));
    CHECK_EQ(mp_plan_init(&plan, numels, count, low, first_limit, limit), status);
    CHECK(plan.rows == NULL && plan.buckets == NULL && plan.row_count == 0 && plan.bucket_count == 0);
    mp_plan_fini(&plan);
}

static void
test_limits(void)
{
    /* Exactly the limit fits; one element more does not. */
    check_built((int64_t[]){MIB / 4, MIB / 4, 1}, 3, MP_BF16, MIB, 25 * MIB, 2);
    check_built((int64_t[]){MIB / 4, MIB / 4}, 2, MP_BF16, MIB, 25 * MIB, 1);
    check_built((int64_t[]){MIB / 4, MIB / 4 + 1}, 2, MP_BF16, MIB, 25 * MIB, 2);
    /* Later buckets have the other limit. */
    check_built((int64_t[]){MIB / 2, MIB, MIB, MIB, MIB}, 5, MP_F16, MIB, 4 * MIB, 3);
    /* A row above the limit is alone: first, in the middle, last. */
    check_built((int64_t[]){3 * MIB, 10, 10}, 3, MP_F16, MIB, 4 * MIB, 2);
    check_built((int64_t[]){10, 3 * MIB, 10, 10}, 4, MP_F16, MIB, 4 * MIB, 3);
    check_built((int64_t[]){10, 10, 3 * MIB}, 3, MP_F16, MIB, 4 * MIB, 2);
    /* Limits below one row and below the alignment: a bucket a row. */
    check_built((int64_t[]){1, 1, 1}, 3, MP_BF16, 1, 1, 3);
    check_built((int64_t[]){1, 1, 1}, 3, MP_BF16, 257, 257, 3);
    check_built((int64_t[]){1, 1, 1}, 3, MP_BF16, 258, 258, 2);
    /* The other castable types. */
    check_built((int64_t[]){64, 64}, 2, MP_F32, 512, 512, 1);
    check_built((int64_t[]){64, 64}, 2, MP_F64, 512, 512, 2);
    check_built(&(int64_t){7}, 1, MP_BF16, INT64_MAX, INT64_MAX, 1);
}

static void
test_empty_rows(void)
{
    enum { BULK = 1000 };
    static int64_t numels[BULK + 2];
    check_built(NULL, 0, MP_BF16, MIB, MIB, 0);
    check_built(&(int64_t){0}, 1, MP_BF16, MIB, MIB, 1);
    check_built(numels, BULK, MP_BF16, MIB, MIB, 1);
    check_built((int64_t[]){0, MIB}, 2, MP_BF16, MIB, MIB, 1);
    check_built((int64_t[]){MIB, 0}, 2, MP_BF16, MIB, MIB, 1);
    check_built((int64_t[]){MIB, 0, 1, 0}, 4, MP_BF16, MIB, MIB, 2);
    numels[BULK] = 5 * MIB;
    check_built(numels, BULK + 1, MP_BF16, MIB, MIB, 1);
    numels[0] = 3;
    numels[BULK + 1] = 1;
    check_built(numels, BULK + 2, MP_BF16, MIB, MIB, 3);
}

static void
test_large_rows(void)
{
    int64_t around[] = {INT32_MAX, (int64_t)INT32_MAX + 1, (int64_t)INT32_MAX + 2, ((int64_t)1 << 32) + 1, 1};
    check_built(around, 5, MP_BF16, MIB, 25 * MIB, 5);
    check_built(around, 5, MP_F64, MIB, 25 * MIB, 5);
    check_built(around, 5, MP_BF16, 64 * GIB, GIB, 1); /* offsets beyond 32 bits within a bucket */
    for (size_t i = 0; i < 4; i++) {
        check_built(&around[i], 1, MP_F16, MIB, MIB, 1);
    }
}

static void
test_many_rows(void)
{
    enum { ROWS = 20000 };
    int64_t *numels = malloc(ROWS * sizeof(*numels));
    unsigned state = 1;
    for (size_t i = 0; i < ROWS; i++) {
        state = state * 1664525 + 1013904223;
        numels[i] = state >> 30 == 0 ? 0 : state >> (8 + (state & 15)); /* 0 to 16 Mi elements, of all sizes */
    }
    mp_plan plan;
    clock_t begin = clock();
    CHECK_EQ(mp_plan_init(&plan, numels, ROWS, MP_BF16, MIB, 25 * MIB), MP_PLAN_OK);
    CHECK((double)(clock() - begin) / CLOCKS_PER_SEC < 0.5); /* linear: a millisecond, sanitizers included */
    check_plan(&plan, numels, ROWS, MIB, 25 * MIB);
    int64_t total = 0;
    for (size_t i = 0; i < plan.bucket_count; i++) {
        total += plan.buckets[i].bytes;
    }
    CHECK(total > 16 * GIB);
    mp_plan_fini(&plan);
    free(numels);
}

static void
test_refusals(void)
{
    int64_t one = 1;
    check_refused((int64_t[]){1, -1}, 2, MP_BF16, MIB, MIB, MP_PLAN_ARGUMENT);
    check_refused(&(int64_t){INT64_MIN}, 1, MP_BF16, MIB, MIB, MP_PLAN_ARGUMENT);
    check_refused(&one, 1, MP_BF16, 0, MIB, MP_PLAN_ARGUMENT);
    check_refused(&one, 1, MP_BF16, MIB, 0, MP_PLAN_ARGUMENT);
    check_refused(&one, 1, MP_BF16, MIB, -1, MP_PLAN_ARGUMENT);
    check_refused(&one, 1, MP_DTYPE_NONE, MIB, MIB, MP_PLAN_ARGUMENT);
    check_refused(&one, 1, MP_NDTYPE, MIB, MIB, MP_PLAN_ARGUMENT);
    check_refused(&(int64_t){INT64_MAX}, 1, MP_BF16, MIB, MIB, MP_PLAN_OVERFLOW);
    check_refused(&(int64_t){INT64_MAX / 2}, 1, MP_BF16, MIB, MIB, MP_PLAN_OVERFLOW); /* by its padding */
    check_built(&(int64_t){INT64_MAX / 2 - 127}, 1, MP_BF16, MIB, MIB, 1);
    int64_t half = INT64_MAX / 4 + 1; /* two of them pass 63 bits together */
    check_refused((int64_t[]){half, half}, 2, MP_BF16, INT64_MAX, INT64_MAX, MP_PLAN_OVERFLOW);
    check_refused((int64_t[]){half, half}, 2, MP_BF16, MIB, MIB, MP_PLAN_OVERFLOW);
}

static void
test_memory_out(void)
{
    int64_t numels[] = {1, 2, 3};
    mp_plan plan;
    for (long nth = 1; nth <= 2; nth++) {
        malloc_fails_at(nth);
        check_refused(numels, 3, MP_BF16, MIB, MIB, MP_PLAN_MEMORY);
    }
    malloc_fails_at(3); /* the list of buckets cannot be trimmed: nothing is lost */
    CHECK_EQ(mp_plan_init(&plan, numels, 3, MP_BF16, MIB, MIB), MP_PLAN_OK);
    malloc_fails_at(0);
    check_plan(&plan, numels, 3, MIB, MIB);
    mp_plan_fini(&plan);
}

int
main(void)
{
    test_limits();
    test_empty_rows();
    test_large_rows();
    test_many_rows();
    test_refusals();
    test_memory_out();
    return check_status();
}
