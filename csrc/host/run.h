/* A run on the host: the rows of one launch, cut into pieces so that more than one thread can work on them.  No locks
 * inside. */
#ifndef DDP_MP_HOST_RUN_H
#define DDP_MP_HOST_RUN_H

#include <stddef.h>
#include <stdint.h>

#include "core/row.h"
#include "host/convert.h"

/* Everything that one launch fixes. */
typedef struct mp_host_run {
    const mp_row *rows; /* borrowed */
    size_t count;
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
