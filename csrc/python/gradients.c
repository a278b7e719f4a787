/* The type Gradients: its birth, its methods, its end.  gradients.h says what a backward is to it. */
#include "python/gradients.h"

#include <structmember.h>

int
mp_gradients_enter(Gradients *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "Gradients: another operation on it is under way");
        return -1;
    }
    self->busy = 1;
    return 0;
}

void
mp_gradients_leave(Gradients *self)
{
    self->busy = 0;
}

/* ---- construction ----------------------------------------------------------------------------------------------- */

/* Element counts through the exchange where a master can be read, else by asking it: a row that cannot is always left to
 * the caller. */
static int
take_row(Gradients *self, size_t index, PyObject *master, PyObject *cast)
{
    grad_row *row = &self->rows[index];
    mp_view view;
    const char *why = NULL;
    row->master = Py_NewRef(master);
    row->bucket = SIZE_MAX;
    row->dtype = MP_DTYPE_NONE;
    int is_cast = PyObject_IsTrue(cast);
    if (is_cast < 0) {
        return -1;
    }
    row->cast = (uint8_t)is_cast;
    mp_exchange_result result = mp_exchange_view(self->state->exchange, master, &view, &why);
    if (result == MP_EXCHANGE_OK) {
        row->hint = mp_hint_of(master);
        row->numel = view.numel;
        row->layout = mp_view_layout_key(&view);
        row->dtype = view.layout == MP_LAYOUT_DENSE ? view.dtype : MP_DTYPE_NONE;
        return 0;
    }
    if (result == MP_EXCHANGE_REFUSED) {
        PyObject *numel = PyObject_CallMethod(master, "numel", NULL);
        row->numel = numel != NULL ? PyLong_AsLongLong(numel) : -1;
        Py_XDECREF(numel);
        if (!PyErr_Occurred()) {
            return 0;
        }
    }
    mp_error_name(self->names, index, "reading it");
    return -1;
}

static int
take_rows(Gradients *self, PyObject *masters, PyObject *cast)
{
    size_t count = (size_t)PyTuple_GET_SIZE(masters), some = count > 0 ? count : 1;
    if ((size_t)PyTuple_GET_SIZE(cast) != count) {
        PyErr_Format(PyExc_ValueError, "cast: expected %zu, one per master, found %zd", count, PyTuple_GET_SIZE(cast));
        return -1;
    }
    self->rows = PyMem_Calloc(some, sizeof *self->rows);
    self->order = PyMem_Calloc(some, sizeof *self->order);
    self->work = PyMem_Calloc(some, sizeof *self->work);
    self->moves = PyMem_Calloc(some, sizeof *self->moves);
    if (self->rows == NULL || self->order == NULL || self->work == NULL || self->moves == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->row_count = count;
    for (size_t index = 0; index < count; index++) {
        if (take_row(self, index, PyTuple_GET_ITEM(masters, (Py_ssize_t)index),
                     PyTuple_GET_ITEM(cast, (Py_ssize_t)index)) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
take_bucket_row(Gradients *self, size_t index, size_t position, PyObject *item)
{
    bucket_state *bucket = &self->buckets[index];
    Py_ssize_t number = mp_index_parse(item, self->row_count, "buckets: row");
    if (number < 0) {
        return -1;
    }
    grad_row *row = &self->rows[number];
    if (row->bucket != SIZE_MAX || position >= self->row_count) {
        PyErr_Format(PyExc_ValueError, "parameter '%U': in more than one bucket",
                     mp_gradients_name(self, (size_t)number));
        return -1;
    }
    row->bucket = index;
    row->offset = bucket->numel;
    self->order[position] = (size_t)number;
    bucket->count++;
    bucket->numel += row->numel;
    return 0;
}

static int
take_bucket(Gradients *self, size_t index, PyObject *item, size_t *position)
{
    PyObject *rows = PySequence_Tuple(item);
    if (rows == NULL) {
        return -1;
    }
    int failed = 0;
    self->buckets[index].rows = self->order + *position;
    for (Py_ssize_t k = 0; !failed && k < PyTuple_GET_SIZE(rows); k++) {
        failed = take_bucket_row(self, index, (*position)++, PyTuple_GET_ITEM(rows, k)) < 0;
    }
    Py_DECREF(rows);
    self->buckets[index].pending = self->buckets[index].count;
    return failed ? -1 : 0;
}

static int
take_buckets(Gradients *self, PyObject *buckets)
{
    size_t count = (size_t)PyTuple_GET_SIZE(buckets), position = 0;
    self->buckets = PyMem_Calloc(count > 0 ? count : 1, sizeof *self->buckets);
    if (self->buckets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->bucket_count = count;
    for (size_t index = 0; index < count; index++) {
        if (take_bucket(self, index, PyTuple_GET_ITEM(buckets, (Py_ssize_t)index), &position) < 0) {
            return -1;
        }
    }
    if (position != self->row_count) {
        PyErr_Format(PyExc_ValueError, "buckets: expected each of %zu rows in one bucket, found %zu", self->row_count,
                     position);
        return -1;
    }
    return 0;
}

static int
fill(Gradients *self, PyObject *const given[8])
{
    PyObject *masters = PySequence_Tuple(given[0]);
    PyObject *buckets = masters != NULL ? PySequence_Tuple(given[2]) : NULL;
    PyObject *cast = buckets != NULL ? PySequence_Tuple(given[3]) : NULL;
    int result = -1;
    if (cast != NULL) {
        self->names = mp_names_new(given[1], (size_t)PyTuple_GET_SIZE(masters));
        if (self->names != NULL && take_rows(self, masters, cast) == 0) {
            result = take_buckets(self, buckets);
        }
    }
    Py_XDECREF(cast);
    Py_XDECREF(buckets);
    Py_XDECREF(masters);
    return result;
}

static PyObject *
gradients_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"masters",  "names",    "buckets",    "cast",
                               "on_first", "on_ready", "on_special", "on_error", NULL};
    PyObject *given[8];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOO", keywords, &given[0], &given[1], &given[2], &given[3],
                                     &given[4], &given[5], &given[6], &given[7])) {
        return NULL;
    }
    Gradients *self = (Gradients *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = mp_state_of_type(type);
    self->on_first = Py_NewRef(given[4]);
    self->on_ready = Py_NewRef(given[5]);
    self->on_special = Py_NewRef(given[6]);
    self->on_error = Py_NewRef(given[7]);
    mp_attr_init(&self->grad, self->state->str_grad);
    mp_attr_init(&self->requires_grad, self->state->str_requires_grad);
    mp_attr_init(&self->tensor_hooks, self->state->str_backward_hooks);
    mp_attr_init(&self->post_hooks, self->state->str_post_hooks);
    if (fill(self, given) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
gradients_traverse(PyObject *object, visitproc visit, void *arg)
{
    Gradients *self = (Gradients *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t index = 0; index < self->row_count; index++) {
        Py_VISIT(self->rows[index].master);
        Py_VISIT(self->rows[index].leaf);
    }
    Py_VISIT(self->on_first);
    Py_VISIT(self->on_ready);
    Py_VISIT(self->on_special);
    Py_VISIT(self->on_error);
    mp_attr *attrs[] = {&self->grad, &self->requires_grad, &self->tensor_hooks, &self->post_hooks};
    int result = 0;
    for (size_t i = 0; result == 0 && i < sizeof attrs / sizeof *attrs; i++) {
        result = mp_attr_traverse(attrs[i], visit, arg);
    }
    return result;
}

static int
gradients_clear(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    size_t count = self->row_count;
    self->row_count = 0; /* first: a destructor may call a hook or a method */
    for (size_t index = 0; index < count; index++) {
        Py_CLEAR(self->rows[index].master);
        Py_CLEAR(self->rows[index].leaf);
    }
    Py_CLEAR(self->on_first);
    Py_CLEAR(self->on_ready);
    Py_CLEAR(self->on_special);
    Py_CLEAR(self->on_error);
    Py_CLEAR(self->names);
    mp_attr_clear(&self->grad);
    mp_attr_clear(&self->requires_grad);
    mp_attr_clear(&self->tensor_hooks);
    mp_attr_clear(&self->post_hooks);
    return 0;
}

static void
gradients_dealloc(PyObject *object)
{
    Gradients *self = (Gradients *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    gradients_clear(object);
    PyMem_Free(self->buckets);
    PyMem_Free(self->moves);
    PyMem_Free(self->work);
    PyMem_Free(self->order);
    PyMem_Free(self->rows);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- a backward ------------------------------------------------------------------------------------------------- */

static void
end_backward(Gradients *self)
{
    self->active = self->early = 0;
    for (size_t index = 0; index < self->row_count; index++) {
        Py_CLEAR(self->rows[index].leaf);
        self->rows[index].special = 0;
    }
}

static void
reset_round(Gradients *self)
{
    for (size_t index = 0; index < self->row_count; index++) {
        self->rows[index].fired = self->rows[index].counted = self->rows[index].brings = 0;
    }
    for (size_t index = 0; index < self->bucket_count; index++) {
        self->buckets[index].pending = self->buckets[index].count;
        self->buckets[index].launched = 0;
    }
    self->refired = 0;
}

/* Whether the master has a gradient now, or -1 with an exception. */
static int
has_grad(Gradients *self, size_t index)
{
    PyObject *found = mp_attr_get(&self->grad, self->rows[index].master);
    int result = found == NULL ? -1 : found != Py_None;
    Py_XDECREF(found);
    if (result < 0) {
        mp_error_name(self->names, index, "reading its gradient");
    }
    return result;
}

static PyObject *
gradients_begin(PyObject *object, PyObject *early)
{
    Gradients *self = (Gradients *)object;
    int is_early = PyObject_IsTrue(early);
    if (is_early < 0) {
        return NULL;
    }
    for (size_t index = 0; index < self->row_count; index++) {
        grad_row *row = &self->rows[index];
        row->fired_now = 0;
        if (!row->cast) {
            int had = has_grad(self, index);
            if (had < 0) {
                return NULL;
            }
            row->had = (uint8_t)had;
        }
    }
    self->active = 1;
    self->early = is_early;
    self->fires = 0;
    self->direct = 0;
    Py_RETURN_NONE;
}

static PyObject *
gradients_end(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    end_backward((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_reset(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    reset_round((Gradients *)object);
    Py_RETURN_NONE;
}

static PyObject *
gradients_abort(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Gradients *self = (Gradients *)object;
    PyObject *error = NULL;
    for (size_t index = 0; index < self->row_count; index++) {
        PyObject *leaf = self->rows[index].leaf;
        if (leaf != NULL && mp_attr_set(&self->grad, leaf, Py_None) < 0) {
            mp_error_name(self->names, index, "dropping its leaf's gradient");
            mp_error_collect(&error);
        }
    }
    end_backward(self);
    reset_round(self);
    return mp_error_finish(error) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- what is asked ---------------------------------------------------------------------------------------------- */

static PyObject *
gradients_hook(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
    return row < 0 ? NULL : mp_gradient_hook_new(self, (size_t)row);
}

static PyObject *
gradients_source(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
    if (row < 0) {
        return NULL;
    }
    return Py_NewRef(self->rows[row].leaf != NULL ? self->rows[row].leaf : Py_None);
}

static PyObject *
gradients_mark(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t row = mp_index_parse(argument, self->row_count, "row");
    if (row < 0) {
        return NULL;
    }
    self->rows[row].brings = 1;
    Py_RETURN_NONE;
}

static PyObject *
gradients_launch(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket = mp_index_parse(argument, self->bucket_count, "bucket");
    if (bucket < 0) {
        return NULL;
    }
    self->buckets[bucket].launched = 1;
    Py_RETURN_NONE;
}

static PyObject *
gradients_unfired(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket = mp_index_parse(argument, self->bucket_count, "bucket");
    PyObject *list = bucket < 0 ? NULL : PyList_New(0);
    for (size_t k = 0; list != NULL && k < self->buckets[bucket].count; k++) {
        size_t row = self->buckets[bucket].rows[k];
        if (!self->rows[row].fired && mp_list_append_index(list, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Whether give() or accumulate() needs a view for some row of the bucket. */
static PyObject *
gradients_lacks(PyObject *object, PyObject *argument)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket = mp_index_parse(argument, self->bucket_count, "bucket");
    if (bucket < 0) {
        return NULL;
    }
    for (size_t k = 0; k < self->buckets[bucket].count; k++) {
        size_t index = self->buckets[bucket].rows[k];
        int has = self->rows[index].cast || self->rows[index].had ? has_grad(self, index) : 0;
        if (has <= 0) {
            return has < 0 ? NULL : Py_NewRef(Py_True);
        }
    }
    Py_RETURN_FALSE;
}

/* One byte per row: whether a member of it, a byte at this offset, is 1. */
static PyObject *
flags(const Gradients *self, size_t member)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->row_count);
    for (size_t index = 0; bytes != NULL && index < self->row_count; index++) {
        PyBytes_AS_STRING(bytes)[index] = *((const char *)&self->rows[index] + member) == 1;
    }
    return bytes;
}

static PyObject *
gradients_fired_flags(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return flags((Gradients *)object, offsetof(grad_row, fired));
}

static PyObject *
gradients_contributes(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    return flags((Gradients *)object, offsetof(grad_row, brings));
}

/* ---- moving ----------------------------------------------------------------------------------------------------- */

static PyObject *
gradients_pack(PyObject *object, PyObject *args)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket;
    PyObject *out;
    double divisor;
    if (!PyArg_ParseTuple(args, "nOd:pack", &bucket, &out, &divisor) ||
        mp_index_check(bucket, self->bucket_count, "bucket") < 0) {
        return NULL;
    }
    return mp_gradients_pack(self, (size_t)bucket, out, divisor);
}

static int
views_argument(PyObject *views)
{
    if (views != Py_None && !PyTuple_Check(views)) {
        PyErr_Format(PyExc_TypeError, "views: expected a tuple or None, found %.100s", Py_TYPE(views)->tp_name);
        return -1;
    }
    return 0;
}

static PyObject *
gradients_give(PyObject *object, PyObject *args)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket;
    PyObject *reduced, *views, *used;
    double divisor;
    if (!PyArg_ParseTuple(args, "nOOdO:give", &bucket, &reduced, &views, &divisor, &used) ||
        mp_index_check(bucket, self->bucket_count, "bucket") < 0 || views_argument(views) < 0) {
        return NULL;
    }
    if (used != Py_None && (!PyBytes_Check(used) || (size_t)PyBytes_GET_SIZE(used) != self->row_count)) {
        PyErr_Format(PyExc_ValueError, "used: expected one byte for each of %zu rows, or None", self->row_count);
        return NULL;
    }
    return mp_gradients_give(self, (size_t)bucket, reduced, views != Py_None ? views : NULL, divisor,
                                  used != Py_None ? (const uint8_t *)PyBytes_AS_STRING(used) : NULL);
}

static PyObject *
gradients_accumulate(PyObject *object, PyObject *args)
{
    Gradients *self = (Gradients *)object;
    Py_ssize_t bucket;
    PyObject *views;
    if (!PyArg_ParseTuple(args, "nO:accumulate", &bucket, &views) ||
        mp_index_check(bucket, self->bucket_count, "bucket") < 0 || views_argument(views) < 0) {
        return NULL;
    }
    return mp_gradients_accumulate(self, (size_t)bucket, views != Py_None ? views : NULL);
}

/* ---- the type --------------------------------------------------------------------------------------------------- */

static int
set_early(PyObject *object, PyObject *value, void *Py_UNUSED(closure))
{
    int early = value != NULL ? PyObject_IsTrue(value) : 0;
    if (early < 0) {
        return -1;
    }
    ((Gradients *)object)->early = early;
    return 0;
}

#define GETTER(member, expression)                                                                                     \
    static PyObject *get_##member(PyObject *object, void *Py_UNUSED(closure))                                          \
    {                                                                                                                  \
        Gradients *self = (Gradients *)object;                                                                 \
        return expression;                                                                                             \
    }

GETTER(active, PyBool_FromLong(self->active))
GETTER(early, PyBool_FromLong(self->early))
GETTER(fires, PyLong_FromSsize_t(self->fires))
GETTER(refired, PyBool_FromLong(self->refired))
GETTER(direct, PyBool_FromLong(self->direct))

static PyMethodDef gradients_methods[] = {
    {"hook", gradients_hook, METH_O, "hook(row): a post-accumulate-grad hook for the row's master and its leaves."},
    {"begin", gradients_begin, METH_O, "begin(early): a backward starts."},
    {"end", gradients_end, METH_NOARGS, "The backward is over."},
    {"abort", gradients_abort, METH_NOARGS, "After an error: leaves that fired lose their gradients; end() and reset()."},
    {"reset", gradients_reset, METH_NOARGS, "The next round of readiness starts."},
    {"unfired", gradients_unfired, METH_O, "unfired(bucket): rows that have not fired since reset()."},
    {"fired_flags", gradients_fired_flags, METH_NOARGS, "One byte per row: 1 when it fired since reset(), with a gradient."},
    {"contributes", gradients_contributes, METH_NOARGS, "One byte per row: 1 when something was packed since reset()."},
    {"mark", gradients_mark, METH_O, "mark(row): the caller has packed something for the row."},
    {"launch", gradients_launch, METH_O, "launch(bucket): a row of it that fires again raises RuntimeError."},
    {"source", gradients_source, METH_O, "source(row): the leaf that fired last in this backward, or None."},
    {"lacks", gradients_lacks, METH_O, "lacks(bucket): whether give() or accumulate() needs views for some row."},
    {"pack", gradients_pack, METH_VARARGS,
     "pack(bucket, out, divisor): out = (leaf.grad + master.grad) / divisor; leaf.grad = None.  Returns rows left to the "
     "caller."},
    {"give", gradients_give, METH_VARARGS,
     "give(bucket, reduced, views, divisor, used): master.grad = reduced / divisor.  Returns rows left to the caller."},
    {"accumulate", gradients_accumulate, METH_VARARGS,
     "accumulate(bucket, views): master.grad += leaf.grad; leaf.grad = None.  Returns rows left to the caller."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef gradients_getset[] = {
    {"active", get_active, NULL, "Whether a backward is between begin() and end().", NULL},
    {"early", get_early, set_early, "Whether on_ready is called as buckets become ready.", NULL},
    {"fires", get_fires, NULL, "Hooks that fired since begin().", NULL},
    {"refired", get_refired, NULL, "Whether tensors fired twice, or leaf and master, in a backward since reset().", NULL},
    {"direct", get_direct, NULL, "Whether a gradient arrived on a master that has a leaf, since begin().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef gradients_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Gradients, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot gradients_slots[] = {
    {Py_tp_new, gradients_new},
    {Py_tp_dealloc, gradients_dealloc},
    {Py_tp_traverse, gradients_traverse},
    {Py_tp_clear, gradients_clear},
    {Py_tp_methods, gradients_methods},
    {Py_tp_getset, gradients_getset},
    {Py_tp_members, gradients_members},
    {Py_tp_doc, "Readiness and movement of the gradients of one wrapped module's trainable parameters."},
    {0, NULL},
};

static PyType_Spec gradients_spec = {
    .name = "ddp_mp._C.Gradients",
    .basicsize = sizeof(Gradients),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = gradients_slots,
};

int
mp_gradients_init(PyObject *module, mp_state *state)
{
    PyTypeObject *type = mp_type_add(module, &gradients_spec);
    Py_XDECREF(type); /* the module keeps it */
    return type != NULL ? mp_gradient_hook_init(module, state) : -1;
}
