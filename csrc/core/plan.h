/* The plan: which parameter is cast into which place of which bucket.  No Python, no backend, no memory touched.
 *
 * Parameters come in forward order.  The first bucket is small, so that the first layers start early; later
 * ones are large.  Each bucket is one arena of low-precision memory; rows start at multiples of MP_ROW_ALIGN.
 * A parameter larger than the limit has a bucket of its own.  All counts and offsets are 64 bits.
 */
#ifndef DDP_MP_PLAN_H
#define DDP_MP_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"

#define MP_ROW_ALIGN 256

typedef struct mp_plan_row {
    int64_t numel;
    int64_t offset; /* bytes from the start of the bucket's arena, multiple of MP_ROW_ALIGN */
    int64_t bytes;  /* numel * size of the low type */
    int32_t bucket;
} mp_plan_row;

typedef struct mp_plan_bucket {
    size_t first; /* index of its first row */
    size_t count; /* rows; they are consecutive */
    int64_t bytes; /* arena size, a multiple of MP_ROW_ALIGN; 0 when all its rows are empty */
} mp_plan_bucket;

typedef struct mp_plan {
    mp_plan_row *rows;       /* owned */
    size_t row_count;
    mp_plan_bucket *buckets; /* owned */
    size_t bucket_count;
    mp_dtype low;
} mp_plan;

typedef enum mp_plan_status {
    MP_PLAN_OK = 0,
    MP_PLAN_MEMORY = -1,
    MP_PLAN_OVERFLOW = -2, /* a size does not fit 63 bits */
    MP_PLAN_ARGUMENT = -3, /* negative numel, limits below 1, not a low type */
} mp_plan_status;

/* Builds a plan over `count` element counts.  On failure *plan is zeroed.  mp_plan_fini is always safe after. */
mp_plan_status mp_plan_init(mp_plan *plan, const int64_t *numels, size_t count, mp_dtype low,
                            int64_t first_bucket_bytes, int64_t bucket_bytes);
void mp_plan_fini(mp_plan *plan);

/* Debug builds: aborts with a message when an invariant does not hold.  Release builds: nothing. */
void mp_plan_check(const mp_plan *plan);

#endif
