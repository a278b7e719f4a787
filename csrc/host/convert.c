/* Choosing kernels: which instruction set runs here, and which of its kernels fits a row. */
#include "host/convert.h"

#include <string.h>

#include "host/convert_kernel.h"

/* ---- Instruction sets ---- */

static const mp_cast_isa *const registry[] = {
#if defined(__x86_64__)
    &mp_cast_avx512,
    &mp_cast_avx2,
#elif defined(__aarch64__)
    &mp_cast_neon,
#endif
    &mp_cast_scalar,
    NULL,
};

const mp_cast_isa *const *
mp_cast_all(void)
{
    return registry;
}

const mp_cast_isa *
mp_cast_select(const char *name)
{
    for (const mp_cast_isa *const *isa = registry; *isa != NULL; isa++) {
        if ((name == NULL || strcmp(name, (*isa)->name) == 0) && (*isa)->usable()) {
            return *isa;
        }
    }
    return NULL;
}

/* ---- Rows ---- */

/* Elements [begin, end) of a row as a row of their own; a NULL operand stays NULL. */
static mp_row
slice(const mp_row *row, int64_t begin, int64_t end)
{
    const size_t first = (size_t)begin;
    mp_row part = *row;
    if (row->src != NULL) {
        part.src = (const char *)row->src + first * mp_dtype_size(row->src_dtype);
    }
    if (row->add != NULL) {
        part.add = (const char *)row->add + first * mp_dtype_size(row->add_dtype);
    }
    part.dst = (char *)row->dst + first * mp_dtype_size(row->dst_dtype);
    part.numel = end - begin;
    return part;
}

/* Elements that the generic path widens at a time: two buffers of doubles take 8 KiB of stack, and stay in the
 * first-level cache between the passes. */
#define FUSE_BLOCK 512

/* The formula of row.h for any types, block by block: widen with the cast kernels, compute, round with them. */
#define DEFINE_FUSE(name, wide, WIDE)                                                                                \
    static void name(const mp_cast_isa *isa, const mp_row *row, double divisor)                                      \
    {                                                                                                                \
        wide sum[FUSE_BLOCK], term[FUSE_BLOCK];                                                                      \
        for (int64_t begin = 0; begin < row->numel; begin += FUSE_BLOCK) {                                           \
            const int64_t left = row->numel - begin;                                                                 \
            const mp_row block = slice(row, begin, left < FUSE_BLOCK ? row->numel : begin + FUSE_BLOCK);             \
            const size_t n = (size_t)block.numel;                                                                    \
            if (block.src != NULL) {                                                                                 \
                isa->cast[block.src_dtype][WIDE](block.src, sum, n);                                                 \
            }                                                                                                        \
            else {                                                                                                   \
                memset(sum, 0, n * sizeof *sum);                                                                     \
            }                                                                                                        \
            if (block.add != NULL) {                                                                                 \
                isa->cast[block.add_dtype][WIDE](block.add, term, n);                                                \
                for (size_t i = 0; i < n; i++) {                                                                     \
                    sum[i] += term[i];                                                                               \
                }                                                                                                    \
            }                                                                                                        \
            if (divisor != 1.0) {                                                                                    \
                for (size_t i = 0; i < n; i++) {                                                                     \
                    sum[i] /= (wide)divisor;                                                                         \
                }                                                                                                    \
            }                                                                                                        \
            isa->cast[WIDE][block.dst_dtype](sum, block.dst, n);                                                     \
        }                                                                                                            \
    }

DEFINE_FUSE(fuse_as_float, float, MP_F32)
DEFINE_FUSE(fuse_as_double, double, MP_F64)

void
mp_fuse_generic(const mp_cast_isa *isa, const mp_row *row, double divisor)
{
    const int wide = (row->src != NULL && row->src_dtype == MP_F64) ||
                     (row->add != NULL && row->add_dtype == MP_F64) || row->dst_dtype == MP_F64;
    (wide ? fuse_as_double : fuse_as_float)(isa, row, divisor);
}

/* The kernel made for the row's types; NULL: there is none. */
static mp_fuse_fn
find_fuse(const mp_cast_isa *isa, const mp_row *row)
{
    if (row->src == NULL) {
        return row->add != NULL ? isa->fuse_same[row->add_dtype][row->dst_dtype] : NULL;
    }
    if (row->add == NULL || row->add_dtype == row->src_dtype) {
        return isa->fuse_same[row->src_dtype][row->dst_dtype];
    }
    return row->add_dtype == MP_F32 ? isa->fuse_f32[row->src_dtype][row->dst_dtype] : NULL;
}

/* Non-temporal stores end with a fence that waits for memory; below a page that costs more than it saves. */
#define STREAM_MIN_BYTES 4096

/* add == NULL and divisor == 1: nothing to compute, every bit counts. */
static void
run_cast(const mp_cast_isa *isa, const mp_row *row, int stream)
{
    const size_t n = (size_t)row->numel;
    const size_t bytes = n * mp_dtype_size(row->dst_dtype);
    if (row->src == NULL) {
        memset(row->dst, 0, bytes);
        return;
    }
    mp_cast_fn cast = isa->cast[row->src_dtype][row->dst_dtype];
    if (stream && bytes >= STREAM_MIN_BYTES && isa->stream[row->src_dtype][row->dst_dtype] != NULL) {
        cast = isa->stream[row->src_dtype][row->dst_dtype];
    }
    cast(row->src, row->dst, n);
}

void
mp_row_run(const mp_cast_isa *isa, const mp_row *row, int64_t begin, int64_t end, double divisor, int stream)
{
    if (begin >= end) {
        return;
    }
    const mp_row part = slice(row, begin, end);
    if (part.add == NULL && divisor == 1.0) {
        run_cast(isa, &part, stream);
        return;
    }
    const mp_fuse_fn fuse = find_fuse(isa, &part);
    if (fuse != NULL) {
        fuse(part.src, part.add, part.dst, (size_t)part.numel, divisor);
    }
    else {
        mp_fuse_generic(isa, &part, divisor);
    }
}
