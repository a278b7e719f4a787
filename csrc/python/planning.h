/* The planner as Python sees it: the low type by name, refusals as exceptions, results as lists.  Everything needs the
 * GIL. */
#ifndef DDP_MP_PLANNING_H
#define DDP_MP_PLANNING_H

#include <Python.h>

#include "core/plan.h"

/* "bfloat16" or "torch.bfloat16": any type that is cast.  0, or -1 with TypeError. */
int mp_plan_parse_low(const char *name, mp_dtype *low);

/* mp_plan_init().  0, or -1 with an exception that names what does not fit. */
int mp_plan_make(mp_plan *plan, const int64_t *numels, size_t count, mp_dtype low, long long first_bucket_bytes,
                 long long bucket_bytes);

/* New lists, of (first row, rows, arena bytes) and of (bucket, offset in bytes), or NULL with an exception. */
PyObject *mp_plan_buckets(const mp_plan *plan);
PyObject *mp_plan_rows(const mp_plan *plan);

#endif
