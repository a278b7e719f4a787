/* Copies of row lists and the cutting of runs; see host/rows.h. */
#include "host/rows.h"

#include <stdlib.h>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Pieces of a row begin at multiples of this many elements, which keeps the alignment that the row's start has. */
#define PIECE_ELEMENTS 512

/* What a row costs besides its bytes.  Bounds the number of rows in a piece, and so the time that one cut takes. */
#define ROW_COST 256

static int
castable(const void *pointer, mp_dtype dtype)
{
    return pointer == NULL || mp_dtype_size(dtype) != 0;
}

static mp_status
check_row(const mp_row *row, size_t index, mp_error *err)
{
    /* The limit is far beyond any memory, and keeps every sum of bytes below in range. */
    if (row->numel < 0 || row->numel > INT64_MAX / 64) {
        return mp_error_set(err, MP_ERR_ARGUMENT, "host table_set: row %zu has %lld elements", index,
                            (long long)row->numel);
    }
    if (row->numel == 0) {
        return MP_OK;
    }
    if (row->dst == NULL) {
        return mp_error_set(err, MP_ERR_ARGUMENT, "host table_set: row %zu has elements and no destination", index);
    }
    if (!castable(row->dst, row->dst_dtype) || !castable(row->src, row->src_dtype) ||
        !castable(row->add, row->add_dtype)) {
        return mp_error_set(err, MP_ERR_ARGUMENT, "host table_set: row %zu converts %s and %s to %s", index,
                            mp_dtype_name(row->src_dtype), mp_dtype_name(row->add_dtype),
                            mp_dtype_name(row->dst_dtype));
    }
    return MP_OK;
}

static size_t
bytes_read(const mp_row *row)
{
    return (row->src != NULL ? mp_dtype_size(row->src_dtype) : 0) +
           (row->add != NULL ? mp_dtype_size(row->add_dtype) : 0);
}

mp_status
mp_host_rows_new(const mp_row *rows, size_t count, mp_host_rows **out, mp_error *err)
{
    mp_host_rows *copy = NULL;
    if (count <= (SIZE_MAX - sizeof(*copy)) / sizeof(*rows)) {
        copy = malloc(sizeof(*copy) + count * sizeof(*rows));
    }
    if (copy == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "host table_set: no memory for %zu rows", count);
    }
    atomic_init(&copy->references, 1);
    copy->count = count;
    copy->read = copy->written = 0;
    for (size_t i = 0; i < count; i++) {
        if (check_row(&rows[i], i, err) != MP_OK) {
            free(copy);
            return err->status;
        }
        copy->rows[i] = rows[i];
        if (rows[i].numel > 0) {
            copy->read += (uint64_t)rows[i].numel * bytes_read(&rows[i]);
            copy->written += (uint64_t)rows[i].numel * mp_dtype_size(rows[i].dst_dtype);
        }
    }
    *out = copy;
    return MP_OK;
}

mp_host_rows *
mp_host_rows_ref(mp_host_rows *rows)
{
    if (rows != NULL) {
        atomic_fetch_add_explicit(&rows->references, 1, memory_order_relaxed);
    }
    return rows;
}

void
mp_host_rows_unref(mp_host_rows *rows)
{
    if (rows != NULL && atomic_fetch_sub_explicit(&rows->references, 1, memory_order_acq_rel) == 1) {
        free(rows);
    }
}

/* Field by field: the padding of a caller's rows says nothing. */
static int
row_equal(const mp_row *a, const mp_row *b)
{
    return a->src == b->src && a->add == b->add && a->dst == b->dst && a->numel == b->numel &&
           a->src_dtype == b->src_dtype && a->add_dtype == b->add_dtype && a->dst_dtype == b->dst_dtype;
}

int
mp_host_rows_equal(const mp_host_rows *copy, const mp_row *rows, size_t count)
{
    if (copy == NULL || copy->count != count) {
        return copy == NULL && count == 0;
    }
    for (size_t i = 0; i < count; i++) {
        if (!row_equal(&copy->rows[i], &rows[i])) {
            return 0;
        }
    }
    return 1;
}

int
mp_host_run_advance(const mp_host_run *run, mp_host_place *place, int64_t bytes)
{
    size_t count = run->rows != NULL ? run->rows->count : 0;
    while (place->row < count && bytes > 0) {
        const mp_row *row = &run->rows->rows[place->row];
        int64_t left = row->numel - place->element;
        int64_t each = left > 0 ? (int64_t)(bytes_read(row) + mp_dtype_size(row->dst_dtype)) : 1;
        if (left > bytes / each) {
            int64_t piece = bytes / each / PIECE_ELEMENTS * PIECE_ELEMENTS;
            if (piece == 0) {
                piece = left < PIECE_ELEMENTS ? left : PIECE_ELEMENTS;
            }
            place->element += piece;
            return 0; /* a row that ends exactly here is found finished by the next call */
        }
        bytes -= left * each + ROW_COST;
        *place = (mp_host_place){.row = place->row + 1};
    }
    return place->row >= count;
}

/* torch.set_flush_denormal is a setting of a thread.  On x86 conversions keep subnormals whichever thread runs them, so
 * that the worker and its callers write the same bits.  Elsewhere the setting is left as it is: on AArch64 a thread that
 * flushes may write zeros where the worker writes subnormals. */
static unsigned
enter_exact_arithmetic(void)
{
#ifdef __SSE2__
    unsigned control = _mm_getcsr();
    _mm_setcsr(0x1f80); /* the processor's default: exceptions masked, to nearest, no flushing */
    return control;
#else
    return 0; /* unused */
#endif
}

static void
leave_exact_arithmetic(unsigned control)
{
#ifdef __SSE2__
    _mm_setcsr(control);
#else
    (void)control;
#endif
}

void
mp_host_run_between(const mp_host_run *run, mp_host_place from, mp_host_place to)
{
    unsigned control = enter_exact_arithmetic();
    for (size_t i = from.row; i < to.row; i++) {
        const mp_row *row = &run->rows->rows[i];
        int64_t begin = i == from.row ? from.element : 0;
        if (begin < row->numel) {
            mp_row_run(run->isa, row, begin, row->numel, run->divisor, run->stream);
        }
    }
    int64_t begin = from.row == to.row ? from.element : 0;
    if (begin < to.element) { /* never at the end of the table, where to.element is 0 */
        mp_row_run(run->isa, &run->rows->rows[to.row], begin, to.element, run->divisor, run->stream);
    }
    leave_exact_arithmetic(control);
}

void
mp_host_run_all(const mp_host_run *run)
{
    size_t count = run->rows != NULL ? run->rows->count : 0;
    mp_host_run_between(run, (mp_host_place){0}, (mp_host_place){.row = count});
}
