/* The cutting of runs; see host/run.h. */
#include "host/run.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* Pieces of a row begin at multiples of this many elements, which keeps the alignment that the row's start has. */
#define PIECE_ELEMENTS 512

/* What a row costs besides its bytes.  Bounds the number of rows in a piece, and so the time that one cut takes. */
#define ROW_COST 256

int
mp_host_run_advance(const mp_host_run *run, mp_host_place *place, int64_t bytes)
{
    while (place->row < run->count && bytes > 0) {
        const mp_row *row = &run->rows[place->row];
        int64_t left = row->numel - place->element;
        int64_t each = left > 0 ? (int64_t)(mp_row_read_size(row) + mp_dtype_size(row->dst_dtype)) : 1;
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
    return place->row >= run->count;
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
        const mp_row *row = &run->rows[i];
        int64_t begin = i == from.row ? from.element : 0;
        if (begin < row->numel) {
            mp_row_run(run->isa, row, begin, row->numel, run->divisor, run->stream);
        }
    }
    int64_t begin = from.row == to.row ? from.element : 0;
    if (begin < to.element) { /* never at the end of the rows, where to.element is 0 */
        mp_row_run(run->isa, &run->rows[to.row], begin, to.element, run->divisor, run->stream);
    }
    leave_exact_arithmetic(control);
}

void
mp_host_run_all(const mp_host_run *run)
{
    mp_host_run_between(run, (mp_host_place){0}, (mp_host_place){.row = run->count});
}
