#include "cuda_nvrtc.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Newest first.  Bare names: the copy that PyTorch's wheels bring is found by its soname once it is in the process, any
 * other by the loader's search path; never the current directory. */
static const char *const library_names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"};

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

/* First pass: what is in the process already, so that there are never two versions of it. */
static void *
open_library(void)
{
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < sizeof library_names / sizeof *library_names; i++) {
            void *library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL | (pass == 0 ? RTLD_NOLOAD : 0));
            if (library != NULL) {
                return library;
            }
        }
    }
    return NULL;
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
