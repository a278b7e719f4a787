/* Finds NVRTC, which nothing promises to be there, and compiles the kernel's source with it.
 *
 * PyTorch's wheels bring the library in a folder that the loader does not search; it is looked for there, too.
 */
#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Newest first.  Bare names for the loader's search path; never the current directory. */
static const char *const library_names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"};

#define NAMES (sizeof library_names / sizeof *library_names)

/* Where PyTorch's wheels keep NVRTC, seen from the folder of the CUDA runtime that they bring. */
static const char *const neighbours[] = {"", "/../../cuda_nvrtc/lib"};

typedef struct program_s *program;

/* The part of NVRTC's ABI that we use; 0 is success. */
#define NVRTC_SYMBOLS(X)                                                                                              \
    X(nvrtcVersion, (int *major, int *minor))                                                                         \
    X(nvrtcGetNumSupportedArchs, (int *count))                                                                        \
    X(nvrtcGetSupportedArchs, (int *architectures))                                                                   \
    X(nvrtcCreateProgram,                                                                                             \
      (program * out, const char *source, const char *name, int headers, const char *const *texts,                    \
       const char *const *names))                                                                                     \
    X(nvrtcCompileProgram, (program from, int count, const char *const *options))                                     \
    X(nvrtcDestroyProgram, (program * from))                                                                          \
    X(nvrtcGetPTXSize, (program from, size_t *size))                                                                  \
    X(nvrtcGetPTX, (program from, char *out))                                                                         \
    X(nvrtcGetCUBINSize, (program from, size_t *size))                                                                \
    X(nvrtcGetCUBIN, (program from, char *out))

typedef struct nvrtc {
    void *library;
#define NVRTC_FIELD(name, parameters) int(*name) parameters;
    NVRTC_SYMBOLS(NVRTC_FIELD)
#undef NVRTC_FIELD
} nvrtc;

/* Copies the folder of the CUDA runtime that is in the process, unless it was loaded by a relative path. */
static int
find_runtime(struct dl_phdr_info *info, size_t size, void *folder)
{
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (info->dlpi_name[0] != '/' || strncmp(slash + 1, "libcudart.so.", 13) != 0 ||
        slash - info->dlpi_name >= PATH_MAX) {
        return 0;
    }
    snprintf(folder, PATH_MAX, "%.*s", (int)(slash - info->dlpi_name), info->dlpi_name);
    return 1;
}

/* PyTorch loads its copy of NVRTC only when it needs it, from a folder that the loader does not know. */
static void *
open_beside_runtime(void)
{
    char folder[PATH_MAX], path[PATH_MAX + 64];
    if (dl_iterate_phdr(find_runtime, folder) == 0) {
        return NULL;
    }
    for (size_t i = 0; i < NAMES; i++) {
        for (size_t j = 0; j < sizeof neighbours / sizeof *neighbours; j++) {
            snprintf(path, sizeof path, "%s%s/%s", folder, neighbours[j], library_names[i]);
            void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (library != NULL) {
                return library;
            }
        }
    }
    return NULL;
}

static void *
open_by_name(int flags)
{
    for (size_t i = 0; i < NAMES; i++) {
        void *library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL | flags);
        if (library != NULL) {
            return library;
        }
    }
    return NULL;
}

/* What is in the process already comes first, so that there are never two versions of it. */
static void *
open_library(void)
{
    void *library = open_by_name(RTLD_NOLOAD);
    if (library == NULL) {
        library = open_beside_runtime();
    }
    return library != NULL ? library : open_by_name(0);
}

/* The library stays loaded: it starts threads and registers exit handlers of its own. */
static const char *
load(nvrtc *lib)
{
    lib->library = open_library();
    if (lib->library == NULL) {
        return "NVRTC not found";
    }
#define NVRTC_RESOLVE(name, parameters)                                                                               \
    {                                                                                                                 \
        void *address = dlsym(lib->library, #name);                                                                   \
        if (address == NULL) {                                                                                        \
            return "NVRTC lacks " #name;                                                                              \
        }                                                                                                             \
        memcpy(&lib->name, &address, sizeof address);                                                                 \
    }
    NVRTC_SYMBOLS(NVRTC_RESOLVE)
#undef NVRTC_RESOLVE
    return NULL;
}

/* The newest architecture that NVRTC knows and that is not newer than the device; 0 when there is none. */
static int
choose_architecture(const nvrtc *lib, int capability)
{
    int count = 0, best = 0;
    if (lib->nvrtcGetNumSupportedArchs(&count) != 0 || count <= 0) {
        return 0;
    }
    int *known = calloc((size_t)count, sizeof *known);
    if (known != NULL && lib->nvrtcGetSupportedArchs(known) == 0) {
        for (int i = 0; i < count; i++) {
            if (known[i] <= capability && known[i] > best) {
                best = known[i];
            }
        }
    }
    free(known);
    return best;
}

/* The result of a compiled program, NUL-terminated; NULL when something failed. */
static void *
fetch(const nvrtc *lib, program from, int machine_code)
{
    size_t size = 0;
    if ((machine_code ? lib->nvrtcGetCUBINSize : lib->nvrtcGetPTXSize)(from, &size) != 0 || size == 0) {
        return NULL;
    }
    char *data = malloc(size + 1);
    if (data == NULL) {
        return NULL;
    }
    data[size] = '\0';
    if ((machine_code ? lib->nvrtcGetCUBIN : lib->nvrtcGetPTX)(from, data) != 0) {
        free(data);
        return NULL;
    }
    return data;
}

void *
mp_nvrtc_compile(const char *source, int capability, char *note, size_t note_size)
{
    nvrtc lib;
    const char *why = load(&lib);
    if (why != NULL) {
        snprintf(note, note_size, "%s", why);
        return NULL;
    }
    int major = 0, minor = 0;
    (void)lib.nvrtcVersion(&major, &minor); /* for the note alone */
    const int architecture = choose_architecture(&lib, capability);
    if (architecture == 0) {
        snprintf(note, note_size, "NVRTC %d.%d knows no architecture of this device", major, minor);
        return NULL;
    }
    const int machine_code = architecture == capability;
    char target[48];
    snprintf(target, sizeof target, "--gpu-architecture=%s_%d", machine_code ? "sm" : "compute", architecture);
    const char *const options[] = {target, "--std=c++17"};
    program made = NULL;
    void *result = NULL;
    int code = lib.nvrtcCreateProgram(&made, source, "cast.cu", 0, NULL, NULL);
    if (code == 0) {
        code = lib.nvrtcCompileProgram(made, 2, options);
        result = code == 0 ? fetch(&lib, made, machine_code) : NULL;
        (void)lib.nvrtcDestroyProgram(&made); /* the result is a copy */
    }
    if (result != NULL) {
        snprintf(note, note_size, "compiled by NVRTC %d.%d for %s", major, minor, strchr(target, '=') + 1);
    }
    else {
        snprintf(note, note_size, "NVRTC %d.%d failed (%d)", major, minor, code);
    }
    return result;
}
