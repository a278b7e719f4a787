/* The rows of a host table and how they are run: an immutable copy that a table and its pending launches share, cut
 * into pieces so that more than one thread can work on it.  No locks inside; the count of references is atomic. */
#ifndef DDP_MP_HOST_ROWS_H
#define DDP_MP_HOST_ROWS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/backend.h"
#include "host/convert.h"
#include "core/row.h"

typedef struct mp_host_rows {
    atomic_size_t references;
    size_t count;
    uint64_t read;    /* bytes that one run reads */
    uint64_t written; /* bytes that one run writes */
    mp_row rows[];
} mp_host_rows;

/* A checked copy with one reference, owned by the caller. */
mp_status mp_host_rows_new(const mp_row *rows, size_t count, mp_host_rows **out, mp_error *err);
mp_host_rows *mp_host_rows_ref(mp_host_rows *rows); /* returns its argument; NULL is ignored */
void mp_host_rows_unref(mp_host_rows *rows);        /* NULL is ignored */

/* Whether the copy holds exactly these rows.  NULL holds none. */
int mp_host_rows_equal(const mp_host_rows *copy, const mp_row *rows, size_t count);

/* A run: everything that one launch fixes.  `rows` may be NULL: no rows. */
typedef struct mp_host_run {
    mp_host_rows *rows;
    const mp_cast_isa *isa;
    double divisor;
    int stream; /* non-temporal stores */
} mp_host_run;

/* A place between two elements. */
typedef struct mp_host_place {
    size_t row;
    int64_t element;
} mp_host_place;

/* Moves *place on by about `bytes` of traffic, never past the end.  Returns whether the end is reached. */
int mp_host_run_advance(const mp_host_run *run, mp_host_place *place, int64_t bytes);
/* Runs everything from one place to another on the calling thread. */
void mp_host_run_between(const mp_host_run *run, mp_host_place from, mp_host_place to);
/* Runs everything. */
void mp_host_run_all(const mp_host_run *run);

#endif
