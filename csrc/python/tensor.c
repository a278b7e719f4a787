/* Tensor -> raw facts, by the exchange table of its type.  See python/tensor.h; what is described is read in core/dlpack.c,
 * the binary interface is in dlpack_abi.h. */
#include "python/tensor.h"

#include "python/attr.h"
#include "core/dlpack_abi.h"
#include "core/dlpack.h"

/* Types seen in one process: Parameter, Tensor, a few subclasses.  Bounded, so that classes made on the fly are not kept
 * alive without end; a type that falls out is looked up again. */
#define CACHED_TYPES 16

/* A chain of tables longer than this is a ring. */
#define LONGEST_CHAIN 32

typedef struct entry {
    PyTypeObject *type;       /* owned; NULL: free */
    PyObject *capsule;        /* owned; NULL when the type offers no table that we understand */
    const dl_exchange *table; /* NULL likewise; DLPack promises that it lives as long as the process */
    PyObject *is_neg;         /* owned; the type's own method in C, called without a look-up; NULL: asked by name */
} entry;

enum { NAME_TABLE, NAME_IS_NEG, NAME_IS_CONJ, NAME_COUNT };

struct mp_exchange {
    entry entries[CACHED_TYPES];
    size_t next;                 /* the entry replaced next */
    PyObject *names[NAME_COUNT]; /* owned, interned */
    void *(*simulated_stream)(void); /* NULL: memory is where tensors say it is */
};

/* --- the cache --------------------------------------------------------------------------------------------------- */

mp_exchange *
mp_exchange_new(void)
{
    static const char *const texts[NAME_COUNT] = {
        [NAME_TABLE] = "__dlpack_c_exchange_api__",
        [NAME_IS_NEG] = "is_neg",
        [NAME_IS_CONJ] = "is_conj",
    };
    mp_exchange *exchange = PyMem_Calloc(1, sizeof(*exchange));
    if (exchange == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (int i = 0; i < NAME_COUNT; i++) {
        exchange->names[i] = PyUnicode_InternFromString(texts[i]);
        if (exchange->names[i] == NULL) {
            mp_exchange_free(exchange);
            return NULL;
        }
    }
    return exchange;
}

void
mp_exchange_clear(mp_exchange *exchange)
{
    for (size_t i = 0; i < CACHED_TYPES; i++) {
        exchange->entries[i].table = NULL;
        Py_CLEAR(exchange->entries[i].is_neg);
        Py_CLEAR(exchange->entries[i].capsule);
        Py_CLEAR(exchange->entries[i].type);
    }
}

void
mp_exchange_free(mp_exchange *exchange)
{
    mp_exchange_clear(exchange);
    for (int i = 0; i < NAME_COUNT; i++) {
        Py_CLEAR(exchange->names[i]);
    }
    PyMem_Free(exchange);
}

int
mp_exchange_traverse(mp_exchange *exchange, visitproc visit, void *arg)
{
    for (size_t i = 0; i < CACHED_TYPES; i++) {
        Py_VISIT(exchange->entries[i].type);
        Py_VISIT(exchange->entries[i].capsule);
        Py_VISIT(exchange->entries[i].is_neg);
    }
    return 0;
}

/* The table of our major version in a capsule's chain, or NULL where there is none that describes tensors and names
 * streams, as DLPack asks for.  `capsule` may be any object. */
static const dl_exchange *
table_in(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, DL_CAPSULE_EXCHANGE)) {
        return NULL;
    }
    const dl_exchange_header *header = PyCapsule_GetPointer(capsule, DL_CAPSULE_EXCHANGE);
    for (int i = 0; header != NULL && i < LONGEST_CHAIN; i++, header = header->previous) {
        if (header->version.major == DL_MAJOR) {
            const dl_exchange *table = (const dl_exchange *)header;
            return table->tensor_from_object != NULL && table->current_stream != NULL ? table : NULL;
        }
    }
    return NULL;
}

/* An attribute of the type: a new reference, or NULL when it has none.  0, or -1 with an exception. */
static int
type_attribute(PyTypeObject *type, PyObject *name, PyObject **out)
{
    *out = PyObject_GetAttr((PyObject *)type, name);
    return mp_attr_optional(*out);
}

/* *out: the method is_neg of a type that has it and is_conj in C, as torch.Tensor, else NULL: a new reference.  0, or -1
 * with an exception. */
static int
bit_method(mp_exchange *exchange, PyTypeObject *type, PyObject **out)
{
    PyObject *is_conj = NULL;
    if (type_attribute(type, exchange->names[NAME_IS_NEG], out) < 0) {
        return -1;
    }
    if (type_attribute(type, exchange->names[NAME_IS_CONJ], &is_conj) < 0) {
        Py_CLEAR(*out);
        return -1;
    }
    if (*out != NULL && (is_conj == NULL || type->tp_getattro != PyObject_GenericGetAttr ||
                         !Py_IS_TYPE(*out, &PyMethodDescr_Type) || !Py_IS_TYPE(is_conj, &PyMethodDescr_Type))) {
        Py_CLEAR(*out);
    }
    Py_XDECREF(is_conj);
    return 0;
}

/* Looks at a type for the first time.  0, or -1 with an exception. */
static int
add_type(mp_exchange *exchange, PyTypeObject *type, const entry **out)
{
    PyObject *capsule, *is_neg;
    if (type_attribute(type, exchange->names[NAME_TABLE], &capsule) < 0) {
        return -1;
    }
    if (bit_method(exchange, type, &is_neg) < 0) {
        Py_XDECREF(capsule);
        return -1;
    }
    const dl_exchange *table = capsule != NULL ? table_in(capsule) : NULL;
    if (table == NULL) {
        Py_CLEAR(capsule);
    }
    /* Filled before the old references go: dropping those may run code that comes back here. */
    entry *place = &exchange->entries[exchange->next];
    entry old = *place;
    exchange->next = (exchange->next + 1) % CACHED_TYPES;
    *place = (entry){.type = (PyTypeObject *)Py_NewRef(type), .capsule = capsule, .table = table, .is_neg = is_neg};
    *out = place;
    Py_XDECREF(old.is_neg);
    Py_XDECREF(old.capsule);
    Py_XDECREF(old.type);
    return 0;
}

/* *out: what is known of the type; good until another type is looked for.  0, or -1 with an exception. */
static int
find_type(mp_exchange *exchange, PyTypeObject *type, const entry **out)
{
    for (size_t i = 0; i < CACHED_TYPES; i++) {
        if (exchange->entries[i].type == type) {
            *out = &exchange->entries[i];
            return 0;
        }
    }
    return add_type(exchange, type, out);
}

/* *out: the type's exchange table (borrowed), NULL when it has none.  0, or -1 with an exception. */
static int
find_table(mp_exchange *exchange, PyTypeObject *type, const dl_exchange **out)
{
    const entry *found;
    if (find_type(exchange, type, &found) < 0) {
        return -1;
    }
    *out = found->table;
    return 0;
}

/* --- refusals ---------------------------------------------------------------------------------------------------- */

/* The current exception becomes a refusal, unless it is none of the tensor's making.  A foreign table may also have failed
 * without one. */
static mp_exchange_result
refuse_exception(const char *reason, const char **why)
{
    if (PyErr_Occurred() &&
        (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))) {
        return MP_EXCHANGE_ERROR;
    }
    PyErr_Clear();
    *why = reason;
    return MP_EXCHANGE_REFUSED;
}

static mp_exchange_result
refuse_if(const char *reason, const char **why)
{
    *why = reason;
    return reason != NULL ? MP_EXCHANGE_REFUSED : MP_EXCHANGE_OK;
}

/* The export failed with the current exception: refuses with what is known of such tensors. */
static mp_exchange_result
refuse_export(PyObject *tensor, const char **why)
{
    static const struct {
        const char *attribute;
        const char *reason;
    } kinds[] = {
        {"is_meta", "a meta tensor has no memory"},
        {"is_sparse", "a sparse tensor has no single run of memory"},
        {"is_sparse_csr", "a sparse tensor has no single run of memory"},
        {"is_mkldnn", "an MKL-DNN tensor has a private layout"},
        {"is_quantized", "a quantized tensor is not supported"},
        {"is_nested", "a nested tensor has no single shape"},
    };
    mp_exchange_result result = refuse_exception("its library does not export it", why);
    for (size_t i = 0; result == MP_EXCHANGE_REFUSED && i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        PyObject *value = PyObject_GetAttrString(tensor, kinds[i].attribute);
        if (value == NULL) {
            result = refuse_exception(*why, why);
            continue;
        }
        int holds = value == Py_True;
        Py_DECREF(value);
        if (holds) {
            *why = kinds[i].reason;
            break;
        }
    }
    return result;
}

static mp_exchange_result
read_object(mp_exchange *exchange, PyObject *tensor, int whole, mp_view *out, const char **why)
{
    const dl_exchange *table;
    if (find_table(exchange, Py_TYPE(tensor), &table) < 0) {
        return MP_EXCHANGE_ERROR;
    }
    if (table == NULL) {
        return refuse_if("its type offers no DLPack exchange table", why);
    }
    dl_tensor described;
    if (table->tensor_from_object(tensor, &described) != 0) {
        return refuse_export(tensor, why);
    }
    /* Shape and strides are the tensor's own: nothing may run before they are copied. */
    mp_exchange_result result = refuse_if(mp_dlpack_read(&described, whole, out), why);
    if (exchange->simulated_stream != NULL && result == MP_EXCHANGE_OK && out->device_type == DL_CPU) {
        out->device_type = DL_CUDA;
        out->device_index = 0;
    }
    return result;
}

/* --- the interface ----------------------------------------------------------------------------------------------- */

/* Refuses when `answer` (stolen, NULL with an exception) of a method is there and not False: the memory then holds other
 * values than the tensor. */
static mp_exchange_result
check_answer(PyObject *answer, const char *reason, const char **why)
{
    if (answer == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            return MP_EXCHANGE_OK;
        }
        /* Lazy parameters do this until they are initialised. */
        return refuse_exception("it does not say whether its negative or conjugate bit is set", why);
    }
    int is_set = answer != Py_False;
    Py_DECREF(answer);
    return refuse_if(is_set ? reason : NULL, why);
}

/* Refuses a tensor whose memory holds other values than it has.  Of PyTorch's own tensors only complex ones can be
 * conjugate, and a gradient or parameter of ours is none: not asking saves 100 ns a gradient. */
static mp_exchange_result
check_bits(mp_exchange *exchange, PyObject *tensor, mp_dtype dtype, const char **why)
{
    static const char negative[] = "its negative bit is set", conjugate[] = "its conjugate bit is set";
    const entry *found;
    if (find_type(exchange, Py_TYPE(tensor), &found) < 0) {
        return MP_EXCHANGE_ERROR;
    }
    if (found->is_neg != NULL && dtype != MP_DTYPE_NONE) {
        PyObject *method = Py_NewRef(found->is_neg);
        PyObject *answer = PyObject_Vectorcall(method, &tensor, 1, NULL);
        Py_DECREF(method);
        return check_answer(answer, negative, why);
    }
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, exchange->names[NAME_IS_NEG]);
    mp_exchange_result result = check_answer(answer, negative, why);
    if (result == MP_EXCHANGE_OK) {
        answer = PyObject_CallMethodNoArgs(tensor, exchange->names[NAME_IS_CONJ]);
        result = check_answer(answer, conjugate, why);
    }
    return result;
}

mp_exchange_result
mp_exchange_view(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why)
{
    mp_exchange_result result = read_object(exchange, tensor, 1, out, why);
    return result == MP_EXCHANGE_OK ? check_bits(exchange, tensor, out->dtype, why) : result;
}

mp_exchange_result
mp_exchange_layout(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why)
{
    return read_object(exchange, tensor, 1, out, why);
}

mp_exchange_result
mp_exchange_pointer(mp_exchange *exchange, PyObject *tensor, mp_view *out, const char **why)
{
    return read_object(exchange, tensor, 0, out, why);
}

int
mp_exchange_current_stream(mp_exchange *exchange, PyObject *tensor, int device_type, int device_index, void **out)
{
    const dl_exchange *table;
    *out = NULL;
    if (device_type == DL_CPU) {
        return 0;
    }
    if (exchange->simulated_stream != NULL) {
        *out = exchange->simulated_stream();
        return 0;
    }
    if (find_table(exchange, Py_TYPE(tensor), &table) < 0) {
        return -1;
    }
    if (table == NULL) {
        PyErr_Format(PyExc_TypeError, "current stream: type %.200s offers no DLPack exchange table", Py_TYPE(tensor)->tp_name);
        return -1;
    }
    return table->current_stream(device_type, device_index, out) == 0 ? 0 : -1;
}

void
mp_exchange_simulate(mp_exchange *exchange, void *(*current_stream)(void))
{
    exchange->simulated_stream = current_stream;
}
