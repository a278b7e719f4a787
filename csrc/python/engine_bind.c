/* Which tensors an Engine switches between: validated by name, taken all together or not at all. */
#include "python/engine.h"

#include <string.h>

static int
validate_dense(const Engine *self, size_t row, const char *what, const mp_view *view)
{
    if (view->layout != MP_LAYOUT_DENSE) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s has gaps or overlaps in memory: expected a dense layout",
                     mp_engine_name(self, row), what);
        return -1;
    }
    if (view->numel != self->plan.rows[row].numel) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s has %lld elements: expected %lld, as planned",
                     mp_engine_name(self, row), what, (long long)view->numel, (long long)self->plan.rows[row].numel);
        return -1;
    }
    if (!mp_view_same_device(view, self->device_type, self->device_index)) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': the %s is on device (%d, %d): expected (%d, %d)",
                     mp_engine_name(self, row), what, view->device_type, view->device_index, self->device_type,
                     self->device_index);
        return -1;
    }
    return 0;
}

static int
validate_master(const Engine *self, size_t row, PyObject *master, mp_view *view)
{
    if (mp_view_named(self->state->exchange, master, view, self->names, row, "master") < 0 ||
        validate_dense(self, row, "master", view) < 0) {
        return -1;
    }
    if (view->dtype == MP_DTYPE_NONE) {
        char type[MP_TYPE_TEXT];
        PyErr_Format(PyExc_TypeError,
                     "parameter '%U': the master is %s, which is not cast: expected float64, float32, bfloat16 or "
                     "float16",
                     mp_engine_name(self, row), mp_view_type(view, type));
        return -1;
    }
    return 0;
}

static int
validate_low(const Engine *self, size_t row, PyObject *low, const mp_view *master, mp_view *view)
{
    if (mp_view_named(self->state->exchange, low, view, self->names, row, "low-precision copy") < 0 ||
        validate_dense(self, row, "low-precision copy", view) < 0) {
        return -1;
    }
    if (view->dtype != self->low) {
        char type[MP_TYPE_TEXT];
        PyErr_Format(PyExc_TypeError, "parameter '%U': the low-precision copy is %s: expected %s",
                     mp_engine_name(self, row), mp_view_type(view, type), mp_dtype_name(self->low));
        return -1;
    }
    if (!mp_view_same_layout(master, view)) {
        PyErr_Format(PyExc_ValueError,
                     "parameter '%U': the low-precision copy differs from the master in shape or strides: elements are "
                     "copied in memory order",
                     mp_engine_name(self, row));
        return -1;
    }
    return 0;
}

static int
validate_arena(const Engine *self, size_t index, PyObject *arena, mp_view *view)
{
    size_t row = self->plan.buckets[index].first;
    if (mp_view_named(self->state->exchange, arena, view, self->names, row, "arena of its bucket") < 0) {
        return -1;
    }
    if (view->type.code != DL_UINT || view->type.bits != 8 || view->type.lanes != 1) {
        char type[MP_TYPE_TEXT];
        PyErr_Format(PyExc_TypeError, "arenas[%zu]: expected uint8, got %s", index, mp_view_type(view, type));
        return -1;
    }
    if (view->layout != MP_LAYOUT_DENSE || view->ndim != 1 || view->numel < self->plan.buckets[index].bytes ||
        !mp_view_same_device(view, self->device_type, self->device_index)) {
        PyErr_Format(PyExc_ValueError,
                     "arenas[%zu]: expected a contiguous uint8 tensor of %lld elements on device (%d, %d), got %lld "
                     "elements in %d dimensions%s on (%d, %d)",
                     index, (long long)self->plan.buckets[index].bytes, self->device_type, self->device_index,
                     (long long)view->numel, view->ndim, view->layout != MP_LAYOUT_DENSE ? " with gaps" : "",
                     view->device_type, view->device_index);
        return -1;
    }
    return 0;
}

/* What bind() collects before it changes anything. */
typedef struct binding {
    PyObject *masters, *lows, *arenas; /* owned tuples; arenas may be NULL */
    void **bases;                      /* owned; arena addresses */
    mp_row *work;                      /* owned */
    uint64_t *layout;                  /* owned */
} binding;

static void
binding_fini(binding *bind)
{
    PyMem_Free(bind->layout);
    PyMem_Free(bind->work);
    PyMem_Free(bind->bases);
    Py_CLEAR(bind->arenas);
    Py_CLEAR(bind->lows);
    Py_CLEAR(bind->masters);
}

static PyObject *
tuple_of(PyObject *sequence, size_t count, const char *what, const char *unit)
{
    PyObject *tuple = PySequence_Tuple(sequence);
    if (tuple != NULL && (size_t)PyTuple_GET_SIZE(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zu, one a %s, got %zd", what, count, unit,
                     PyTuple_GET_SIZE(tuple));
        Py_CLEAR(tuple);
    }
    return tuple;
}

static int
bind_row(Engine *self, binding *bind, size_t row)
{
    mp_view master, low;
    if (validate_master(self, row, PyTuple_GET_ITEM(bind->masters, (Py_ssize_t)row), &master) < 0 ||
        validate_low(self, row, PyTuple_GET_ITEM(bind->lows, (Py_ssize_t)row), &master, &low) < 0) {
        return -1;
    }
    if (bind->arenas != NULL && low.numel > 0) {
        const mp_plan_row *plan = &self->plan.rows[row];
        /* Of addresses in two allocations, as a difference of numbers: pointers into different objects have none. */
        int64_t offset = (int64_t)((uintptr_t)low.data - (uintptr_t)bind->bases[plan->bucket]);
        if (offset != plan->offset) {
            PyErr_Format(PyExc_ValueError,
                         "parameter '%U': the low-precision copy is not at byte %lld of the arena of bucket %d, but "
                         "%lld bytes from its start",
                         mp_engine_name(self, row), (long long)plan->offset, (int)plan->bucket, (long long)offset);
            return -1;
        }
    }
    bind->layout[row] = mp_view_layout_key(&master);
    bind->work[row] = (mp_row){
        .src = master.data,
        .dst = low.data,
        .numel = master.numel,
        .src_dtype = master.dtype,
        .add_dtype = MP_F32, /* not read without `add`; fixed, so that equal rows have equal bytes */
        .dst_dtype = self->low,
    };
    return 0;
}

static int
bind_collect(Engine *self, binding *bind, PyObject *masters, PyObject *lows, PyObject *arenas)
{
    size_t bucket_count = self->plan.bucket_count;
    bind->masters = tuple_of(masters, self->row_count, "masters", "parameter");
    if (bind->masters == NULL || (bind->lows = tuple_of(lows, self->row_count, "lows", "parameter")) == NULL) {
        return -1;
    }
    if (arenas != Py_None && (bind->arenas = tuple_of(arenas, bucket_count, "arenas", "bucket")) == NULL) {
        return -1;
    }
    bind->bases = PyMem_Calloc(bucket_count, sizeof *bind->bases);
    bind->work = PyMem_Calloc(self->row_count, sizeof *bind->work);
    bind->layout = PyMem_Calloc(self->row_count, sizeof *bind->layout);
    if (bind->bases == NULL || bind->work == NULL || bind->layout == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t index = 0; bind->arenas != NULL && index < bucket_count; index++) {
        mp_view view;
        if (self->plan.buckets[index].bytes == 0) {
            continue;
        }
        if (validate_arena(self, index, PyTuple_GET_ITEM(bind->arenas, (Py_ssize_t)index), &view) < 0) {
            return -1;
        }
        bind->bases[index] = view.data;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        if (bind_row(self, bind, row) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Swaps references: the old ones end up in the binding and are dropped by the caller, once everything is consistent. */
/* What one launch of the bucket moves. */
static void
count_bytes(Engine *self, size_t index)
{
    engine_bucket *bucket = &self->buckets[index];
    const mp_plan_bucket *plan = &self->plan.buckets[index];
    bucket->bytes_read = bucket->bytes_written = 0;
    for (size_t row = plan->first; row < plan->first + plan->count; row++) {
        mp_row_count_bytes(&self->work[row], &bucket->bytes_read, &bucket->bytes_written);
    }
}

static int
bind_apply(Engine *self, binding *bind)
{
    PyObject *old = PyList_New(0);
    if (old == NULL) {
        return -1;
    }
    for (size_t row = 0; row < self->row_count; row++) {
        PyObject *pair[] = {self->masters[row], self->lows[row]};
        for (int i = 0; i < 2; i++) {
            if (pair[i] != NULL && PyList_Append(old, pair[i]) < 0) {
                Py_DECREF(old);
                return -1;
            }
        }
    }
    mp_engine_drain(self);
    for (size_t row = 0; row < self->row_count; row++) {
        Py_XSETREF(self->masters[row], Py_NewRef(PyTuple_GET_ITEM(bind->masters, (Py_ssize_t)row)));
        Py_XSETREF(self->lows[row], Py_NewRef(PyTuple_GET_ITEM(bind->lows, (Py_ssize_t)row)));
    }
    memcpy(self->work, bind->work, self->row_count * sizeof *self->work);
    memcpy(self->layout, bind->layout, self->row_count * sizeof *self->layout);
    for (size_t index = 0; index < self->plan.bucket_count; index++) {
        PyObject *arena = bind->arenas != NULL ? PyTuple_GET_ITEM(bind->arenas, (Py_ssize_t)index) : NULL;
        Py_XSETREF(self->arenas[index], Py_XNewRef(arena));
        self->buckets[index].base = bind->bases[index];
        count_bytes(self, index);
    }
    /* Nothing of the old tensors is worth waiting for any more. */
    self->recorded = -1;
    self->waited = -1;
    self->generation++;
    self->bound = 1;
    for (size_t row = 0; row < self->row_count; row++) {
        mp_engine_learn_row(self, row);
    }
    Py_DECREF(old);
    return 0;
}

int
mp_engine_rebind(Engine *self, size_t row, PyObject *master)
{
    mp_view view, low;
    if (validate_master(self, row, master, &view) < 0) {
        return -1;
    }
    /* The low's storage may be released now; its shape and strides can be read through the old master as well. */
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, self->lows[row], &low, &why);
    if (result == MP_EXCHANGE_REFUSED) {
        result = mp_exchange_view(self->state->exchange, self->masters[row], &low, &why);
    }
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, row, "reading its low-precision copy");
        return -1;
    }
    if (result == MP_EXCHANGE_REFUSED) {
        PyErr_Format(PyExc_BufferError,
                     "parameter '%U': neither its low-precision copy nor the master before can be read: %s: bind() both",
                     mp_engine_name(self, row), why);
        return -1;
    }
    if (!mp_view_same_layout(&view, &low)) {
        PyErr_Format(PyExc_ValueError,
                     "parameter '%U': the new master differs from the low-precision copy in shape or strides: bind() "
                     "both",
                     mp_engine_name(self, row));
        return -1;
    }
    mp_engine_drain(self);
    mp_row *work = &self->work[row];
    work->src = view.data;
    work->src_dtype = view.dtype;
    self->layout[row] = mp_view_layout_key(&view);
    count_bytes(self, (size_t)self->plan.rows[row].bucket);
    self->moved[row] = 0;
    Py_SETREF(self->masters[row], Py_NewRef(master));
    mp_engine_learn_row(self, row);
    return 0;
}

int
mp_engine_bind(Engine *self, PyObject *masters, PyObject *lows, PyObject *arenas)
{
    binding bind = {0};
    int result = -1;
    if (self->low_count > 0) {
        PyErr_SetString(PyExc_RuntimeError, "bind(): parameters are in low precision: restore() first");
    }
    else if (bind_collect(self, &bind, masters, lows, arenas) == 0) {
        result = bind_apply(self, &bind);
    }
    binding_fini(&bind);
    return result;
}
