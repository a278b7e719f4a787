/* The part of DLPack's binary interface that we use, declared by ourselves: neither PyTorch nor DLPack is needed to build.
 *
 * Major version 1.  The layout within a major version is fixed; minor versions add enumeration values only.  Before 1.2
 * `strides` may be NULL, which means row-major.
 */
#ifndef DDP_MP_DLPACK_ABI_H
#define DDP_MP_DLPACK_ABI_H

#include <stdint.h>

#define DL_MAJOR 1

/* The name of the capsule that holds an exchange table. */
#define DL_CAPSULE_EXCHANGE "dlpack_exchange_api"

/* DLDeviceType */
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };

/* DLDataTypeCode */
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

typedef struct dl_version {
    uint32_t major;
    uint32_t minor;
} dl_version;

typedef struct dl_device {
    int32_t type;
    int32_t index;
} dl_device;

typedef struct dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* elements */
    uint64_t byte_offset;
} dl_tensor;

/* Tensors that own what they describe; we take none. */
typedef struct dl_managed_versioned dl_managed_versioned;

typedef struct dl_exchange_header {
    dl_version version;
    struct dl_exchange_header *previous; /* an older table of the same library, or NULL */
} dl_exchange_header;

/* Inside a "dlpack_exchange_api" capsule, an attribute of the tensor's type.  Lives as long as the process.  Every function
 * returns 0, or -1 with a Python exception; none synchronises streams. */
typedef struct dl_exchange {
    dl_exchange_header header;
    int (*allocate)(dl_tensor *prototype, dl_managed_versioned **out, void *context,
                    void (*set_error)(void *context, const char *kind, const char *message));
    int (*managed_from_object)(void *object, dl_managed_versioned **out);
    int (*managed_to_object)(dl_managed_versioned *tensor, void **object);
    int (*tensor_from_object)(void *object, dl_tensor *out); /* shape and strides are borrowed */
    int (*current_stream)(int32_t device_type, int32_t device_index, void **out);
} dl_exchange;

#endif
