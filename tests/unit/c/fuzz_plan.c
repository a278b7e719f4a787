/* Plans over element counts and limits of any kind, checked against what plan.h promises.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c \
 *     tests/unit/c/fuzz_plan.c csrc/core/plan.c -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -o fuzz_plan
 *
 * Without an argument it tries the same inputs in every run; `fuzz_plan SECONDS SEED` tries others for so long.  With
 * clang, `-fsanitize=fuzzer -DLIBFUZZER` gives the same checks a driver that looks for inputs that run new code. */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "malloc_fault.h"
#include "core/plan.h"

enum { MOST_ROWS = 200, INPUT_BYTES = 2048 };

static unsigned long outcomes[4]; /* by -status: a run that never saw one of them proves nothing of it */
static unsigned long many_buckets;

typedef struct input {
    const uint8_t *bytes;
    size_t left;
} input;

static uint64_t
take(input *in, size_t bytes)
{
    uint64_t value = 0;
    for (; bytes > 0 && in->left > 0; bytes--, in->left--) {
        value = value << 8 | *in->bytes++;
    }
    return value;
}

/* Of all magnitudes; often next to a power of two, or such that sums meet a limit exactly. */
static int64_t
take_number(input *in)
{
    unsigned kind = (unsigned)take(in, 1);
    if (kind < 60) {
        return (int64_t)(take(in, 1) % 16 * MP_ROW_ALIGN / 2);
    }
    if (kind < 160) {
        return (int64_t)take(in, 1 + kind % 3);
    }
    if (kind < 250) {
        return (int64_t)((UINT64_C(1) << kind % 63) + take(in, 1) - 128);
    }
    return (int64_t)take(in, 8);
}

typedef struct problem {
    int64_t numels[MOST_ROWS];
    size_t count;
    int64_t first_limit, limit;
    mp_dtype low;
} problem;

static problem
take_problem(input *in)
{
    problem out = {.low = (mp_dtype)(take(in, 1) % (MP_NDTYPE + 1))};
    out.first_limit = take_number(in);
    out.limit = take_number(in);
    while (in->left > 0 && out.count < MOST_ROWS) {
        out.numels[out.count++] = take_number(in);
    }
    return out;
}

/* What has to come out, in 128 bits, where nothing overflows. */
static mp_plan_status
due_status(const problem *of)
{
    unsigned __int128 total = 0;
    if (mp_dtype_size(of->low) == 0 || of->first_limit < 1 || of->limit < 1) {
        return MP_PLAN_ARGUMENT;
    }
    for (size_t i = 0; i < of->count; i++) {
        if (of->numels[i] < 0) {
            return MP_PLAN_ARGUMENT;
        }
        unsigned __int128 bytes = (unsigned __int128)of->numels[i] * mp_dtype_size(of->low);
        total += (bytes + MP_ROW_ALIGN - 1) / MP_ROW_ALIGN * MP_ROW_ALIGN;
        /* room for its padding is asked for whether or not it needs any */
        if (bytes + MP_ROW_ALIGN - 1 > INT64_MAX || total > INT64_MAX) {
            return MP_PLAN_OVERFLOW;
        }
    }
    return MP_PLAN_OK;
}

/* Each row is in exactly one bucket, in order, aligned, behind the end of the one before. */
static void
check_rows(const mp_plan *plan, const problem *of)
{
    size_t next = 0;
    for (size_t b = 0; b < plan->bucket_count; b++) {
        const mp_plan_bucket *bucket = &plan->buckets[b];
        int64_t end = 0;
        CHECK_EQ(bucket->first, next);
        CHECK(bucket->count > 0);
        for (size_t k = 0; k < bucket->count && next < plan->row_count; k++, next++) {
            const mp_plan_row *row = &plan->rows[next];
            CHECK_EQ(row->bucket, b);
            CHECK_EQ(row->numel, of->numels[next]);
            CHECK_EQ(row->bytes, row->numel * (int64_t)mp_dtype_size(of->low));
            CHECK_EQ(row->offset % MP_ROW_ALIGN, 0);
            CHECK(row->offset >= end);
            CHECK(row->offset - end < MP_ROW_ALIGN);
            end = row->offset + row->bytes;
        }
        CHECK(bucket->bytes >= end);
        CHECK(bucket->bytes - end < MP_ROW_ALIGN);
        CHECK_EQ(bucket->bytes % MP_ROW_ALIGN, 0);
    }
    CHECK_EQ(next, of->count);
    CHECK_EQ(plan->row_count, of->count);
}

/* A bucket passes its limit only by a row that is alone in it, and ends only where the next row would pass it. */
static void
check_limits(const mp_plan *plan, const problem *of)
{
    for (size_t b = 0; b < plan->bucket_count; b++) {
        const mp_plan_bucket *bucket = &plan->buckets[b];
        int64_t limit = b == 0 ? of->first_limit : of->limit, used = 0;
        size_t filled = 0;
        for (size_t i = bucket->first; i < bucket->first + bucket->count; i++) {
            if (plan->rows[i].bytes > 0) {
                used = plan->rows[i].offset + plan->rows[i].bytes;
                filled++;
            }
        }
        CHECK(filled <= 1 || used <= limit);
        if (b + 1 < plan->bucket_count) {
            const mp_plan_row *row = &plan->rows[bucket[1].first];
            CHECK(row->bytes > 0);
            CHECK((__int128)bucket->bytes + row->bytes > limit);
        }
    }
}

static void
try_input(const uint8_t *bytes, size_t count)
{
    input in = {bytes, count};
    long fault = (long)(take(&in, 1) % 32) - 27; /* 1 to 4: that allocation fails; below: none does */
    problem of = take_problem(&in);
    mp_plan plan;
    memset(&plan, 0xaa, sizeof(plan));
    malloc_fails_at(fault);
    mp_plan_status status = mp_plan_init(&plan, of.numels, of.count, of.low, of.first_limit, of.limit);
    malloc_fails_at(0);
    if (status == MP_PLAN_MEMORY) {
        CHECK(fault >= 1 && fault <= 2);
    } else {
        CHECK_EQ(status, due_status(&of));
    }
    outcomes[-status]++;
    if (status == MP_PLAN_OK) {
        check_rows(&plan, &of);
        check_limits(&plan, &of);
        many_buckets += plan.bucket_count > 2;
    } else {
        CHECK(plan.rows == NULL && plan.buckets == NULL && plan.row_count == 0 && plan.bucket_count == 0);
    }
    mp_plan_fini(&plan);
    mp_plan_fini(&plan);
}

#ifdef LIBFUZZER

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int
LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    try_input(bytes, count);
    if (check_failures > 0) {
        abort();
    }
    return 0;
}

#else

static uint64_t state;

static uint64_t
random_bits(void)
{
    state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t bits = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    bits = (bits ^ bits >> 27) * UINT64_C(0x94d049bb133111eb);
    return bits ^ bits >> 31;
}

/* Mostly numbers that make a plan: one of each 8 inputs is of any bytes. */
static size_t
fill(uint8_t *bytes)
{
    size_t longest = random_bits() % 4 == 0 ? INPUT_BYTES : 64;
    size_t count = random_bits() % longest;
    unsigned most = random_bits() % 8 == 0 ? 256 : random_bits() % 2 == 0 ? 160 : 190;
    for (size_t i = 0; i < count; i++) {
        bytes[i] = (uint8_t)(random_bits() % most);
    }
    return count;
}

int
main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 0;
    state = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    uint8_t bytes[INPUT_BYTES];
    time_t end = time(NULL) + (time_t)seconds;
    unsigned long inputs = 0;
    while (check_failures == 0 && (inputs < 20000 || time(NULL) < end)) {
        try_input(bytes, fill(bytes));
        inputs++;
    }
    CHECK(outcomes[0] > 0 && outcomes[1] > 0 && outcomes[2] > 0 && outcomes[3] > 0 && many_buckets > 0);
    printf("%lu inputs: %lu plans, %lu of more than two buckets; %lu refusals of memory, %lu of sizes, %lu of arguments\n",
           inputs, outcomes[0], many_buckets, outcomes[1], outcomes[2], outcomes[3]);
    return check_status();
}

#endif
