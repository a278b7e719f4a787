/* The planner as Python sees it.  See planning.h; the planner itself, plan.c, knows no Python. */
#include "python/planning.h"

#include <string.h>

int
mp_plan_parse_low(const char *name, mp_dtype *low)
{
    const char *plain = strncmp(name, "torch.", 6) == 0 ? name + 6 : name;
    for (int i = 0; i < MP_NDTYPE; i++) {
        if (strcmp(plain, mp_dtype_name((mp_dtype)i)) == 0) {
            *low = (mp_dtype)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError, "low_dtype '%s': expected float64, float32, bfloat16 or float16", name);
    return -1;
}

/* The planner refused an argument; the type was parsed. */
static void
raise_argument(const int64_t *numels, size_t count, long long first_bucket_bytes, long long bucket_bytes)
{
    for (size_t i = 0; i < count; i++) {
        if (numels[i] < 0) {
            PyErr_Format(PyExc_ValueError, "no plan: numels[%zu]: expected at least 0 elements, got %lld", i,
                         (long long)numels[i]);
            return;
        }
    }
    PyErr_Format(PyExc_ValueError, "no plan: expected bucket limits of at least 1 byte, got %lld and %lld",
                 first_bucket_bytes, bucket_bytes);
}

int
mp_plan_make(mp_plan *plan, const int64_t *numels, size_t count, mp_dtype low, long long first_bucket_bytes,
             long long bucket_bytes)
{
    switch (mp_plan_init(plan, numels, count, low, first_bucket_bytes, bucket_bytes)) {
    case MP_PLAN_OK:
        return 0;
    case MP_PLAN_MEMORY:
        PyErr_NoMemory();
        return -1;
    case MP_PLAN_OVERFLOW:
        PyErr_SetString(PyExc_OverflowError, "the parameters' low-precision copies do not fit 63 bits of bytes");
        return -1;
    default:
        raise_argument(numels, count, first_bucket_bytes, bucket_bytes);
        return -1;
    }
}

PyObject *
mp_plan_buckets(const mp_plan *plan)
{
    PyObject *list = PyList_New((Py_ssize_t)plan->bucket_count);
    for (size_t i = 0; list != NULL && i < plan->bucket_count; i++) {
        const mp_plan_bucket *bucket = &plan->buckets[i];
        PyObject *item = Py_BuildValue("(nnL)", (Py_ssize_t)bucket->first, (Py_ssize_t)bucket->count,
                                       (long long)bucket->bytes);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

PyObject *
mp_plan_rows(const mp_plan *plan)
{
    PyObject *list = PyList_New((Py_ssize_t)plan->row_count);
    for (size_t i = 0; list != NULL && i < plan->row_count; i++) {
        const mp_plan_row *row = &plan->rows[i];
        PyObject *item = Py_BuildValue("(iL)", (int)row->bucket, (long long)row->offset);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}
