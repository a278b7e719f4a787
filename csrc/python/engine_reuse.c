/* Copies that outlive a pass, and parameters that somebody else switched back.
 *
 * A copy may be used again only under a promise of the user: an in-place write through raw memory, `.data` or a fused
 * kernel leaves no trace.  What leaves one is looked for all the same: another address, type or layout (check), and
 * PyTorch's version counter of each parameter, which in-place operations on the parameter itself count up.
 */
#include "python/engine.h"

#include <string.h>

/* Version counters are read as one attribute a row.  0, or -1 with an exception. */
static int
read_version(Engine *self, size_t row, int64_t *out)
{
    if (mp_attr_get_int64(&self->version, self->params[row], out) < 0) {
        mp_error_name(self->names, row, "reading its version counter");
        return -1;
    }
    return 0;
}

int
mp_engine_remember(Engine *self)
{
    if (self->versions == NULL) {
        self->versions = PyMem_Calloc(self->row_count, sizeof *self->versions);
        if (self->versions == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (size_t row = 0; row < self->row_count; row++) {
        if (read_version(self, row, &self->versions[row]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* 1 when no version counter moved since remember(), 0 when one did, -1 with an exception. */
static int
unwritten(Engine *self)
{
    if (self->versions == NULL) {
        return 0;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        int64_t version = 0;
        if (read_version(self, row, &version) < 0) {
            return -1;
        }
        if (version != self->versions[row]) {
            return 0;
        }
    }
    return 1;
}

int
mp_engine_check_unwritten(Engine *self)
{
    int result = mp_engine_check(self);
    if (result != UNCHANGED) {
        return result;
    }
    int same = unwritten(self);
    if (same < 0) {
        return -1;
    }
    return same ? UNCHANGED : WRITTEN;
}

/* 1 when the row's `.data` still is its copy, 0 when it is something else, -1 with an exception.  A copy whose storage
 * was freed cannot be read at all, which no master is. */
static int
still_low(Engine *self, size_t row)
{
    mp_view view;
    const char *why = NULL;
    switch (mp_exchange_pointer(self->state->exchange, self->params[row], &view, &why)) {
    case MP_EXCHANGE_ERROR:
        mp_error_name(self->names, row, "reading its address");
        return -1;
    case MP_EXCHANGE_REFUSED:
        return 1;
    default:
        return view.dtype == self->low && view.data == self->work[row].dst;
    }
}

int
mp_engine_reclaim(Engine *self)
{
    for (size_t row = 0; row < self->row_count && self->low_count > 0; row++) {
        if (!self->is_low[row]) {
            continue;
        }
        int low = still_low(self, row);
        if (low < 0) {
            return -1;
        }
        if (!low) {
            self->is_low[row] = 0;
            self->low_count--;
        }
    }
    return 0;
}
