/* Loads the kernel on a device, from the first image that the device and its driver accept.
 *
 * They are tried in this order: the fat binary that the build embedded, the PTX behind it for drivers older than the
 * toolkit, and what NVRTC makes of the source here and now.
 */
#include "cuda/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/device.h"
#include "cuda/embedded.h"
#include "cuda/nvrtc.h"

/* Results of loading that say "this image is not for this device or driver", so that another image may be.  Any other
 * failure is final: a second image would only hide it. */
static int
other_image_may_load(cu_result code)
{
    switch (code) {
    case 200: /* CUDA_ERROR_INVALID_IMAGE */
    case 209: /* CUDA_ERROR_NO_BINARY_FOR_GPU */
    case 218: /* CUDA_ERROR_INVALID_PTX */
    case 221: /* CUDA_ERROR_JIT_COMPILER_NOT_FOUND */
    case 222: /* CUDA_ERROR_UNSUPPORTED_PTX_VERSION */
    case 223: /* CUDA_ERROR_JIT_COMPILATION_DISABLED */
        return 1;
    default:
        return 0;
    }
}

/* The PTX text for drivers older than the toolkit, or NULL.  It lies behind the fat binary, as kernels/build_image.py
 * says. */
static const char *
old_ptx(void)
{
    static const char magic[8] = {'m', 'p', '-', 'p', 't', 'x', '0', '1'};
    const size_t trailer = sizeof magic + 8;
    if (mp_cuda_image_size < trailer) {
        return NULL;
    }
    const unsigned char *end = mp_cuda_image + mp_cuda_image_size;
    if (memcmp(end - sizeof magic, magic, sizeof magic) != 0) {
        return NULL;
    }
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) {
        length |= (uint64_t)end[i - 16] << (8 * i);
    }
    if (length >= mp_cuda_image_size - trailer || end[-17] != '\0') {
        return NULL;
    }
    return (const char *)(end - trailer - 1 - length);
}

/* The images in the order of trial. */
typedef enum image_kind {
    IMAGE_EMBEDDED,
    IMAGE_OLD_PTX,
    IMAGE_NVRTC,
    IMAGE_KINDS,
} image_kind;

typedef struct image {
    const void *data; /* NULL: there is none */
    void *owned;      /* to be freed, or NULL */
    char name[64];    /* what it is, or why there is none */
} image;

static image
get_image(image_kind kind, int capability)
{
    image result = {NULL, NULL, ""};
    switch (kind) {
    case IMAGE_EMBEDDED:
        result.data = mp_cuda_image_size > 0 ? mp_cuda_image : NULL;
        snprintf(result.name, sizeof result.name, "%s", result.data ? "embedded image" : mp_cuda_image_note);
        break;
    case IMAGE_OLD_PTX:
        result.data = old_ptx();
        snprintf(result.name, sizeof result.name, "embedded PTX for older drivers");
        break;
    default:
        result.owned = mp_nvrtc_compile(mp_cuda_source, capability, result.name, sizeof result.name);
        result.data = result.owned;
        break;
    }
    return result;
}

static mp_status
load_image(const mp_cuda_api *api, int index, const image *from, cu_module *module, cu_function *kernel,
           cu_result *code, mp_error *err)
{
    *code = api->cuModuleLoadData(module, from->data);
    if (*code != CU_OK) {
        *module = NULL;
        return mp_cuda_fail(api, "cuModuleLoadData", *code, index, err);
    }
    const cu_result found = api->cuModuleGetFunction(kernel, *module, "mp_cast");
    if (found == CU_OK) {
        return MP_OK;
    }
    (void)api->cuModuleUnload(*module); /* the failure to tell is the first one */
    *module = NULL;
    return mp_cuda_fail(api, "cuModuleGetFunction", found, index, err);
}

/* Adds "; <name>: <why>" to the list of what was tried. */
static void
note_failure(char *list, size_t size, const char *name, const char *why)
{
    const size_t used = strlen(list);
    snprintf(list + used, size - used, "%s%s%s%s", used ? "; " : "", name, *why ? ": " : "", why);
}

mp_status
mp_cuda_module_load(const mp_cuda_api *api, int index, int capability, cu_module *module, cu_function *kernel,
                    char *note, size_t note_size, mp_error *err)
{
    char tried[200] = "";
    for (image_kind kind = IMAGE_EMBEDDED; kind < IMAGE_KINDS; kind++) {
        image from = get_image(kind, capability);
        if (from.data == NULL) {
            if (kind != IMAGE_OLD_PTX) {
                note_failure(tried, sizeof tried, from.name, "");
            }
            continue;
        }
        cu_result code;
        const mp_status status = load_image(api, index, &from, module, kernel, &code, err);
        free(from.owned);
        if (status == MP_OK) {
            snprintf(note, note_size, "sm_%d, %s", capability, from.name);
            return MP_OK;
        }
        if (!other_image_may_load(code)) {
            return status;
        }
        const char *text = NULL;
        const cu_result named = api->cuGetErrorName(code, &text);
        note_failure(tried, sizeof tried, from.name, named == CU_OK && text != NULL ? text : "not for this device");
    }
    return mp_error_set(err, MP_ERR_UNAVAILABLE, "no kernel for device %d (sm_%d): %s", index, capability, tried);
}
