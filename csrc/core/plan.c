/* Cutting a list of parameters into buckets; see plan.h. */
#include "core/plan.h"

#include <stdlib.h>

#include "core/require.h"

/* Bytes of a row in its arena, padding included.  0, or -1 when they do not fit 63 bits. */
static int
row_sizes(int64_t numel, size_t element, int64_t *bytes, int64_t *padded)
{
    if (__builtin_mul_overflow(numel, (int64_t)element, bytes) ||
        __builtin_add_overflow(*bytes, MP_ROW_ALIGN - 1, padded)) {
        return -1;
    }
    *padded -= *padded % MP_ROW_ALIGN;
    return 0;
}

/* Whether a row starts a new bucket.  A bucket without bytes takes any row: that is how one that is larger than the
 * limit comes to have its own.  Empty rows fit everywhere.  Only the padding of the last row may pass the limit. */
static int
starts_bucket(const mp_plan *plan, const mp_plan_row *row, int64_t first_limit, int64_t limit)
{
    if (plan->bucket_count == 0) {
        return 1;
    }
    int64_t used = plan->buckets[plan->bucket_count - 1].bytes;
    if (row->bytes == 0 || used == 0) {
        return 0;
    }
    /* Written as a difference of non-negative numbers, which cannot overflow. */
    return row->bytes > (plan->bucket_count == 1 ? first_limit : limit) - used;
}

static mp_plan_status
place_rows(mp_plan *plan, const int64_t *numels, size_t count, int64_t first_limit, int64_t limit)
{
    size_t element = mp_dtype_size(plan->low);
    int64_t total = 0; /* of all arenas: whoever adds up buckets cannot overflow either */
    for (size_t i = 0; i < count; i++) {
        mp_plan_row *row = &plan->rows[i];
        int64_t padded;
        if (numels[i] < 0) {
            return MP_PLAN_ARGUMENT;
        }
        row->numel = numels[i];
        if (row_sizes(row->numel, element, &row->bytes, &padded) < 0 ||
            __builtin_add_overflow(total, padded, &total)) {
            return MP_PLAN_OVERFLOW;
        }
        if (starts_bucket(plan, row, first_limit, limit)) {
            plan->buckets[plan->bucket_count++] = (mp_plan_bucket){.first = i};
        }
        mp_plan_bucket *bucket = &plan->buckets[plan->bucket_count - 1];
        row->bucket = (int32_t)(plan->bucket_count - 1);
        row->offset = bucket->bytes;
        bucket->bytes += padded;
        bucket->count++;
    }
    plan->row_count = count;
    return MP_PLAN_OK;
}

/* Room for `count` rows and as many buckets, the most there can be. */
static mp_plan_status
reserve(mp_plan *plan, size_t count)
{
    if (count > INT32_MAX) { /* a row names its bucket in 32 bits */
        return MP_PLAN_OVERFLOW;
    }
    plan->rows = calloc(count, sizeof(*plan->rows));
    plan->buckets = calloc(count, sizeof(*plan->buckets));
    return plan->rows != NULL && plan->buckets != NULL ? MP_PLAN_OK : MP_PLAN_MEMORY;
}

static void
trim_buckets(mp_plan *plan)
{
    void *trimmed = realloc(plan->buckets, plan->bucket_count * sizeof(*plan->buckets));
    if (trimmed != NULL) { /* a failure costs some memory and nothing else */
        plan->buckets = trimmed;
    }
}

mp_plan_status
mp_plan_init(mp_plan *plan, const int64_t *numels, size_t count, mp_dtype low, int64_t first_bucket_bytes,
             int64_t bucket_bytes)
{
    *plan = (mp_plan){.low = low};
    mp_plan_status status = MP_PLAN_OK;
    if (mp_dtype_size(low) == 0 || first_bucket_bytes < 1 || bucket_bytes < 1) {
        status = MP_PLAN_ARGUMENT;
    } else if (count > 0) {
        status = reserve(plan, count);
        if (status == MP_PLAN_OK) {
            status = place_rows(plan, numels, count, first_bucket_bytes, bucket_bytes);
        }
        if (status == MP_PLAN_OK) {
            trim_buckets(plan);
        }
    }
    if (status != MP_PLAN_OK) {
        mp_plan_fini(plan);
        return status;
    }
    mp_plan_check(plan);
    return MP_PLAN_OK;
}

void
mp_plan_fini(mp_plan *plan)
{
    mp_plan_row *rows = plan->rows;
    mp_plan_bucket *buckets = plan->buckets;
    *plan = (mp_plan){0};
    free(buckets);
    free(rows);
}

#ifndef NDEBUG

static void
check_bucket(const mp_plan *plan, size_t index)
{
    const mp_plan_bucket *bucket = &plan->buckets[index];
    int64_t end = 0;
    MP_REQUIRE(bucket->count > 0);
    MP_REQUIRE(bucket->count <= plan->row_count - bucket->first);
    for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
        const mp_plan_row *row = &plan->rows[i];
        MP_REQUIRE((size_t)row->bucket == index);
        MP_REQUIRE(row->numel >= 0);
        MP_REQUIRE(row->bytes == row->numel * (int64_t)mp_dtype_size(plan->low));
        MP_REQUIRE(row->offset == end);
        end += (row->bytes + (MP_ROW_ALIGN - 1)) / MP_ROW_ALIGN * MP_ROW_ALIGN;
    }
    MP_REQUIRE(bucket->bytes == end);
}

void
mp_plan_check(const mp_plan *plan)
{
    size_t next = 0;
    MP_REQUIRE((plan->rows == NULL) == (plan->row_count == 0));
    MP_REQUIRE((plan->buckets == NULL) == (plan->bucket_count == 0));
    for (size_t i = 0; i < plan->bucket_count; i++) {
        MP_REQUIRE(plan->buckets[i].first == next);
        check_bucket(plan, i);
        next += plan->buckets[i].count;
    }
    MP_REQUIRE(next == plan->row_count);
}

#else

void
mp_plan_check(const mp_plan *plan)
{
    (void)plan;
}

#endif
