/* One row of work: a flat run of elements that a multi-tensor operation converts.
 *
 * Every operation of the product is this one formula, row by row and element by element:
 *
 *     dst[i] = to_dst( (wide(src[i]) + wide(add[i])) / divisor )
 *
 * where a NULL src or add counts as zero, and `wide` is float, or double when any of the three types is
 * float64.  A plain cast is add == NULL and divisor == 1: then the result is exactly Tensor.to's, including
 * NaN and subnormals, and no arithmetic is done.  With divisor == 1 nothing is divided.  src and add may
 * alias dst exactly (same address and type); any other overlap is undefined.
 */
#ifndef DDP_MP_ROW_H
#define DDP_MP_ROW_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/dtype.h"

typedef struct mp_row {
    const void *src; /* borrowed; NULL: zeros */
    const void *add; /* borrowed; NULL: nothing is added */
    void *dst;       /* borrowed; never NULL when numel > 0 */
    int64_t numel;   /* elements, >= 0; rows of 0 elements are legal and touch nothing */
    mp_dtype src_dtype;
    mp_dtype add_dtype;
    mp_dtype dst_dtype;
} mp_row;

/* Elements of one row, far beyond any memory: sums of the bytes of rows stay in range. */
#define MP_ROW_NUMEL_MAX (INT64_MAX / 64)

/* Why no backend takes the row, or NULL. */
const char *mp_row_fault(const mp_row *row);

/* Bytes that are read for one element. */
static inline size_t
mp_row_read_size(const mp_row *row)
{
    return (row->src != NULL ? mp_dtype_size(row->src_dtype) : 0) +
           (row->add != NULL ? mp_dtype_size(row->add_dtype) : 0);
}

/* Adds what one run of a valid row reads and writes, in bytes. */
static inline void
mp_row_count_bytes(const mp_row *row, uint64_t *read, uint64_t *written)
{
    *read += (uint64_t)row->numel * mp_row_read_size(row);
    *written += (uint64_t)row->numel * mp_dtype_size(row->dst_dtype);
}

/* Whether multiplying by 1 / divisor gives the same bits as dividing: the divisor is a power of two, as world sizes mostly
 * are, so that the reciprocal is exact and product and quotient are the same real number before rounding, subnormal
 * results included.  The exponents stop where the reciprocal, or the divisor, would be a subnormal float, which a thread
 * or a device that flushes takes for zero. */
static inline int
mp_divisor_is_exact(double divisor)
{
    uint64_t bits;
    memcpy(&bits, &divisor, sizeof bits);
    const int exponent = (int)(bits >> 52 & 0x7ff) - 1023;
    return (bits & 0xfffffffffffffu) == 0 && exponent >= -126 && exponent <= 126;
}

#endif
