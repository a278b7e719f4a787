/* What all backends refuse in a row. */
#include "core/row.h"

static int
is_castable(const void *pointer, mp_dtype dtype)
{
    return pointer == NULL || mp_dtype_size(dtype) != 0;
}

const char *
mp_row_fault(const mp_row *row)
{
    if (row->numel < 0 || row->numel > MP_ROW_NUMEL_MAX) {
        return "numel is negative or too large";
    }
    if (row->numel == 0) {
        return NULL;
    }
    if (row->dst == NULL) {
        return "dst is NULL";
    }
    if (!is_castable(row->src, row->src_dtype)) {
        return "src has an unknown type";
    }
    if (!is_castable(row->add, row->add_dtype)) {
        return "add has an unknown type";
    }
    return is_castable(row->dst, row->dst_dtype) ? NULL : "dst has an unknown type";
}
