/* Leaves of one generation, and the sites that they are placed in.
 *
 * A site is a module and the name of a parameter in it.  A leaf is placed by an entry of that name in the module's
 * `__dict__`, which hides the entry of `_parameters` from `module.name`, and taken back by deleting it.
 *
 * References.  Masters and leaves are owned.  Modules are referred to weakly: a graph keeps this object, a module may
 * keep an output of that graph, and the collector does not see such a cycle.
 *
 * Threads.  The GIL serialises.  Reading an attribute of a tensor subclass may run Python code, which may call any
 * method here: nothing is kept across such a call but the arrays, which live as long as the object.
 */
#include "python/module.h"

#include "python/attr.h"
#include "python/errors.h"

typedef struct leaf {
    PyObject *master;      /* owned */
    PyObject *leaf;        /* owned */
    PyObject *memory;      /* owned; the tensor that the leaf is a part of: its arena */
    int64_t offset;        /* bytes from the start of it */
    int64_t version;       /* as remember() found it, and bumped() counted on */
    const char *hint;      /* of the leaf, to be prefetched */
    const char *master_hint;
    int requires_grad;     /* as match() left it; -1: not known */
} leaf;

typedef struct leaf_site {
    PyObject *key; /* owned */
    size_t leaf;
} leaf_site;

/* A module, and its sites: sites[first], ... up to the next home's. */
typedef struct leaf_home {
    PyObject *module; /* owned weak reference */
    size_t first;
    size_t count;
    const void *hints[3]; /* the module, its dictionary and the dictionary's keys as last seen: to be prefetched only */
} leaf_home;

/* How many leaves and homes ahead objects are asked for. */
#define LEAVES_AHEAD 8
#define HOMES_AHEAD 4

typedef struct Leaves {
    PyObject_HEAD
    mp_state *state; /* borrowed from the module, which the type keeps alive */
    PyObject *names; /* owned tuple of str */
    leaf *leaves;
    size_t leaf_count;
    leaf_site *sites;
    size_t site_count;
    leaf_home *homes;
    size_t home_count;
    mp_attr version;
    mp_attr requires_grad;
} Leaves;

/* ---- construction ----------------------------------------------------------------------------------------------- */

static int
take_memory(leaf *one, PyObject *item)
{
    long long offset;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "memory: expected tuples (tensor, offset in bytes)");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "OL;memory: expected tuples (tensor, offset in bytes)", &one->memory, &offset)) {
        one->memory = NULL;
        return -1;
    }
    Py_INCREF(one->memory);
    one->offset = offset;
    return 0;
}

static int
take_leaves(Leaves *self, PyObject *masters, PyObject *leaves, PyObject *memory)
{
    Py_ssize_t count = PyTuple_GET_SIZE(masters);
    if (PyTuple_GET_SIZE(leaves) != count || PyTuple_GET_SIZE(memory) != count) {
        PyErr_Format(PyExc_ValueError, "leaves and memory: expected %zd, one per master, found %zd and %zd", count,
                     PyTuple_GET_SIZE(leaves), PyTuple_GET_SIZE(memory));
        return -1;
    }
    self->leaves = PyMem_Calloc(count > 0 ? (size_t)count : 1, sizeof *self->leaves);
    if (self->leaves == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        self->leaves[i].master = Py_NewRef(PyTuple_GET_ITEM(masters, i));
        self->leaves[i].leaf = Py_NewRef(PyTuple_GET_ITEM(leaves, i));
        self->leaves[i].requires_grad = -1;
        self->leaves[i].hint = mp_hint_of(PyTuple_GET_ITEM(leaves, i));
        self->leaves[i].master_hint = mp_hint_of(PyTuple_GET_ITEM(masters, i));
        self->leaf_count++;
        if (take_memory(&self->leaves[i], PyTuple_GET_ITEM(memory, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The home of the module: the last one, where it is the same module's, or a new one. */
static leaf_home *
home_of(Leaves *self, PyObject *module)
{
    PyObject *reference = PyWeakref_NewRef(module, NULL); /* the same object for the same module */
    if (reference == NULL) {
        return NULL;
    }
    if (self->home_count > 0 && self->homes[self->home_count - 1].module == reference) {
        Py_DECREF(reference);
    }
    else {
        self->homes[self->home_count++] = (leaf_home){.module = reference, .first = self->site_count};
    }
    return &self->homes[self->home_count - 1];
}

static int
take_site(Leaves *self, PyObject *item)
{
    PyObject *module, *key;
    Py_ssize_t index;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "sites: expected tuples (module, key, index)");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "OUn;sites: expected tuples (module, key, index)", &module, &key, &index) ||
        mp_index_check(index, self->leaf_count, "sites: index") < 0) {
        return -1;
    }
    leaf_home *home = home_of(self, module);
    if (home == NULL) {
        return -1;
    }
    Py_INCREF(key);
    PyUnicode_InternInPlace(&key);
    self->sites[self->site_count++] = (leaf_site){.key = key, .leaf = (size_t)index};
    home->count++;
    return 0;
}

static int
take_sites(Leaves *self, PyObject *sites)
{
    Py_ssize_t count = PyTuple_GET_SIZE(sites);
    size_t some = count > 0 ? (size_t)count : 1;
    self->sites = PyMem_Calloc(some, sizeof *self->sites);
    self->homes = PyMem_Calloc(some, sizeof *self->homes);
    if (self->sites == NULL || self->homes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (take_site(self, PyTuple_GET_ITEM(sites, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
leaves_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"masters", "leaves", "memory", "names", "sites", NULL};
    PyObject *given[5], *masters = NULL, *leaves = NULL, *memory = NULL, *sites = NULL;
    Leaves *self = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO", keywords, &given[0], &given[1], &given[2], &given[3],
                                     &given[4])) {
        return NULL;
    }
    if ((masters = PySequence_Tuple(given[0])) == NULL || (leaves = PySequence_Tuple(given[1])) == NULL ||
        (memory = PySequence_Tuple(given[2])) == NULL || (sites = PySequence_Tuple(given[4])) == NULL) {
        goto error;
    }
    self = (Leaves *)type->tp_alloc(type, 0);
    if (self == NULL) {
        goto error;
    }
    self->state = mp_state_of_type(type);
    mp_attr_init(&self->version, self->state->str_version);
    mp_attr_init(&self->requires_grad, self->state->str_requires_grad);
    self->names = mp_names_new(given[3], (size_t)PyTuple_GET_SIZE(masters));
    if (self->names == NULL || take_leaves(self, masters, leaves, memory) < 0 || take_sites(self, sites) < 0) {
        Py_CLEAR(self);
    }
error:
    Py_XDECREF(sites);
    Py_XDECREF(memory);
    Py_XDECREF(leaves);
    Py_XDECREF(masters);
    return (PyObject *)self;
}

static int
leaves_traverse(PyObject *object, visitproc visit, void *arg)
{
    Leaves *self = (Leaves *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->leaf_count; i++) {
        Py_VISIT(self->leaves[i].master);
        Py_VISIT(self->leaves[i].leaf);
        Py_VISIT(self->leaves[i].memory);
    }
    int result = mp_attr_traverse(&self->version, visit, arg);
    return result != 0 ? result : mp_attr_traverse(&self->requires_grad, visit, arg);
}

static int
leaves_clear(PyObject *object)
{
    Leaves *self = (Leaves *)object;
    size_t leaf_count = self->leaf_count, home_count = self->home_count;
    self->leaf_count = self->home_count = 0; /* first: a destructor may call a method */
    for (size_t i = 0; i < leaf_count; i++) {
        Py_CLEAR(self->leaves[i].master);
        Py_CLEAR(self->leaves[i].leaf);
        Py_CLEAR(self->leaves[i].memory);
    }
    for (size_t i = 0; i < home_count; i++) {
        Py_CLEAR(self->homes[i].module);
    }
    for (; self->site_count > 0; self->site_count--) {
        Py_CLEAR(self->sites[self->site_count - 1].key);
    }
    Py_CLEAR(self->names);
    mp_attr_clear(&self->version);
    mp_attr_clear(&self->requires_grad);
    return 0;
}

static void
leaves_dealloc(PyObject *object)
{
    Leaves *self = (Leaves *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    leaves_clear(object);
    PyMem_Free(self->homes);
    PyMem_Free(self->sites);
    PyMem_Free(self->leaves);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- placing ---------------------------------------------------------------------------------------------------- */

static inline void
prefetch_home(const Leaves *self, size_t index)
{
    if (index < self->home_count) {
        const leaf_home *home = &self->homes[index];
        __builtin_prefetch(home->module);
        __builtin_prefetch(home->hints[0]);
        __builtin_prefetch(home->hints[1]);
        __builtin_prefetch(home->hints[2]);
        __builtin_prefetch((const char *)home->hints[2] + 64);
    }
}

/* The module's `__dict__`, a new reference.  NULL without an exception where the module is gone, else with one. */
static PyObject *
attributes_of(leaf_home *home)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *module = NULL;
    (void)PyWeakref_GetRef(home->module, &module); /* fails only for what is no weak reference */
#else
    PyObject *module = Py_XNewRef(PyWeakref_GetObject(home->module));
    if (module == Py_None) {
        Py_CLEAR(module);
    }
#endif
    if (module == NULL) {
        return NULL;
    }
    PyObject *attributes = PyObject_GenericGetDict(module, NULL);
    home->hints[0] = module;
    home->hints[1] = attributes;
    home->hints[2] = attributes != NULL ? ((PyDictObject *)attributes)->ma_keys : NULL;
    Py_DECREF(module);
    return attributes;
}

/* Deletes the entry where it is the site's leaf.  1 when it was, 0 when not, -1 with an exception. */
static int
remove_site(const Leaves *self, PyObject *attributes, size_t site)
{
    PyObject *key = self->sites[site].key;
    PyObject *found = PyDict_GetItemWithError(attributes, key); /* borrowed */
    if (found != self->leaves[self->sites[site].leaf].leaf) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return PyDict_DelItem(attributes, key) < 0 ? -1 : 1;
}

/* Takes back the first `count` sites; goes on past errors and raises the first.  1 when each held its leaf. */
static int
take_back(Leaves *self, size_t count)
{
    PyObject *error = NULL;
    int all = 1;
    for (size_t i = 0; i < self->home_count && self->homes[i].first < count; i++) {
        leaf_home *home = &self->homes[i];
        prefetch_home(self, i + HOMES_AHEAD);
        PyObject *attributes = attributes_of(home);
        if (attributes == NULL && PyErr_Occurred()) {
            mp_error_collect(&error);
        }
        for (size_t k = home->first; attributes != NULL && k < home->first + home->count && k < count; k++) {
            int removed = remove_site(self, attributes, k);
            if (removed < 0) {
                mp_error_collect(&error);
            }
            all &= removed == 1;
        }
        Py_XDECREF(attributes);
    }
    return mp_error_finish(error) < 0 ? -1 : all;
}

/* 1 when the entry is new, 0 when there was one already, -1 with an exception. */
static int
add_site(const Leaves *self, PyObject *attributes, size_t site)
{
    Py_ssize_t before = PyDict_GET_SIZE(attributes);
    PyObject *leaf = self->leaves[self->sites[site].leaf].leaf;
    if (PyDict_SetDefault(attributes, self->sites[site].key, leaf) == NULL) {
        return -1;
    }
    return PyDict_GET_SIZE(attributes) != before;
}

static PyObject *
leaves_place(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    int added = 1;
    size_t stop = 0; /* the sites before it are placed */
    for (size_t i = 0; added == 1 && i < self->home_count; i++) {
        leaf_home *home = &self->homes[i];
        prefetch_home(self, i + HOMES_AHEAD);
        PyObject *attributes = attributes_of(home);
        if (attributes == NULL && PyErr_Occurred()) {
            added = -1;
        }
        for (stop = home->first; attributes != NULL && stop < home->first + home->count; stop++) {
            added = add_site(self, attributes, stop);
            if (added != 1) {
                break;
            }
        }
        Py_XDECREF(attributes);
    }
    if (added != 1) {
        PyObject *error = added < 0 ? mp_error_take() : NULL;
        if (take_back(self, stop) < 0) {
            mp_error_collect(&error);
        }
        if (error != NULL) {
            mp_error_give(error);
            return NULL;
        }
    }
    return PyBool_FromLong(added);
}

static PyObject *
leaves_take_back(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    int all = take_back(self, self->site_count);
    return all < 0 ? NULL : PyBool_FromLong(all);
}

/* ---- what leaves have of their masters -------------------------------------------------------------------------- */

/* Whether the tensor requires grad, or -1 with an exception. */
static int
asks_grad(Leaves *self, PyObject *tensor, size_t index)
{
    PyObject *value = mp_attr_get(&self->requires_grad, tensor);
    int result = value == Py_True ? 1 : value == Py_False ? 0 : value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    if (result < 0) {
        mp_error_name(self->names, index, "asking whether it requires grad");
    }
    return result;
}

static PyObject *
leaves_match(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    for (size_t i = 0; i < self->leaf_count; i++) {
        leaf *one = &self->leaves[i];
        if (i + LEAVES_AHEAD < self->leaf_count) {
            const leaf *ahead = &self->leaves[i + LEAVES_AHEAD];
            mp_prefetch_tensor(ahead->master, ahead->master_hint);
        }
        int asked = asks_grad(self, one->master, i);
        if (asked < 0) {
            return NULL;
        }
        if (asked != one->requires_grad) {
            if (mp_attr_set(&self->requires_grad, one->leaf, asked ? Py_True : Py_False) < 0) {
                mp_error_name(self->names, i, "setting requires_grad of its leaf");
                return NULL;
            }
            one->requires_grad = asked;
        }
    }
    Py_RETURN_NONE;
}

/* The address of a tensor's first element; NULL where it cannot be read, as where its memory was freed.
 * 0, or -1 with an exception. */
static int
address_of(Leaves *self, size_t index, PyObject *tensor, const char **out)
{
    mp_view view;
    const char *why = NULL;
    mp_exchange_result result = mp_exchange_pointer(self->state->exchange, tensor, &view, &why);
    *out = result == MP_EXCHANGE_OK ? view.data : NULL;
    if (result == MP_EXCHANGE_ERROR) {
        mp_error_name(self->names, index, "reading where its leaf is");
        return -1;
    }
    return 0;
}

static int
version_of(Leaves *self, size_t index, int64_t *out)
{
    if (mp_attr_get_int64(&self->version, self->leaves[index].leaf, out) < 0) {
        mp_error_name(self->names, index, "reading the version counter of its leaf");
        return -1;
    }
    return 0;
}

static PyObject *
leaves_remember(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    for (size_t i = 0; i < self->leaf_count; i++) {
        if (version_of(self, i, &self->leaves[i].version) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
leaves_bumped(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    for (size_t i = 0; i < self->leaf_count; i++) {
        self->leaves[i].version++;
    }
    Py_RETURN_NONE;
}

/* Whether the leaf is somewhere else than in its memory, or was written.  *memory and *start are those of the leaf
 * before, which mostly is in the same.  A tensor without elements has no address.  -1 with an exception. */
static int
is_written(Leaves *self, size_t index, const PyObject **memory, const char **start)
{
    const leaf *one = &self->leaves[index];
    const char *address;
    int64_t version = 0;
    if (one->memory != *memory) {
        if (address_of(self, index, one->memory, start) < 0) {
            return -1;
        }
        *memory = one->memory;
    }
    if (address_of(self, index, one->leaf, &address) < 0 || version_of(self, index, &version) < 0) {
        return -1;
    }
    return version != one->version || (*start != NULL && address != NULL && address != *start + one->offset);
}

/* Appends the index to *list, which is made where there is none.  0, or -1 with an exception. */
static int
append(PyObject **list, size_t index)
{
    if (*list == NULL && (*list = PyList_New(0)) == NULL) {
        return -1;
    }
    return mp_list_append_index(*list, index);
}

static PyObject *
leaves_changed(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Leaves *self = (Leaves *)object;
    PyObject *written = NULL, *toggled = NULL, *result = NULL;
    const PyObject *memory = NULL;
    const char *start = NULL;
    for (size_t i = 0; i < self->leaf_count; i++) {
        leaf *one = &self->leaves[i];
        if (i + LEAVES_AHEAD < self->leaf_count) {
            const leaf *ahead = &self->leaves[i + LEAVES_AHEAD];
            mp_prefetch_tensor(ahead->leaf, ahead->hint);
        }
        int is = is_written(self, i, &memory, &start);
        if (is < 0 || (is && append(&written, i) < 0)) {
            goto error;
        }
        int asked = asks_grad(self, one->leaf, i);
        if (asked < 0 || (one->requires_grad >= 0 && asked != one->requires_grad && append(&toggled, i) < 0)) {
            goto error;
        }
        one->requires_grad = asked; /* the master is about to be told: match() starts from what the leaf has */
    }
    if (written == NULL && toggled == NULL) {
        Py_RETURN_NONE;
    }
    if ((written != NULL || (written = PyList_New(0)) != NULL) && (toggled != NULL || (toggled = PyList_New(0)) != NULL)) {
        result = PyTuple_Pack(2, written, toggled);
    }
error:
    Py_XDECREF(toggled);
    Py_XDECREF(written);
    return result;
}

static PyMethodDef leaves_methods[] = {
    {"place", leaves_place, METH_NOARGS,
     "Puts every leaf into its sites.  False, and nothing is stored, where a site has an entry already."},
    {"take_back", leaves_take_back, METH_NOARGS,
     "Deletes the entries that are our leaves.  Returns whether every site held its leaf."},
    {"match", leaves_match, METH_NOARGS, "requires_grad of every leaf becomes its master's."},
    {"remember", leaves_remember, METH_NOARGS, "Notes the version counter of every leaf, for changed()."},
    {"bumped", leaves_bumped, METH_NOARGS, "The version of every leaf was counted up by one since remember()."},
    {"changed", leaves_changed, METH_NOARGS,
     "None, or (indices of leaves written since remember(), indices whose requires_grad was set since match())."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot leaves_slots[] = {
    {Py_tp_new, leaves_new},
    {Py_tp_dealloc, leaves_dealloc},
    {Py_tp_traverse, leaves_traverse},
    {Py_tp_clear, leaves_clear},
    {Py_tp_methods, leaves_methods},
    {Py_tp_doc, "The leaves of one generation, and the sites that they are placed in."},
    {0, NULL},
};

static PyType_Spec leaves_spec = {
    .name = "ddp_mp._C.Leaves",
    .basicsize = sizeof(Leaves),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = leaves_slots,
};

int
mp_leaves_init(PyObject *module, mp_state *state)
{
    (void)state;
    PyTypeObject *type = mp_type_add(module, &leaves_spec);
    Py_XDECREF(type); /* the module keeps it */
    return type != NULL ? 0 : -1;
}
