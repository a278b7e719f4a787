/* Opens the CUDA driver's library and fills the symbol table of cuda/driver.h, once a process.
 *
 * A driver that is missing or too old is no error here: the table is then empty and the reason is kept for whoever asks.
 */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The names to try, in order.  Only the first exists where a driver is installed without the toolkit; the second is a
 * development link that on some machines is all there is.  Bare names: the loader's search path, never the current
 * directory. */
static const char *const library_names[] = {"libcuda.so.1", "libcuda.so"};

static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static mp_cuda_api api;
static char failure[256]; /* empty: the table is usable */

/* cuGetProcAddress_v2 (CUDA 12) and the first version (11.3), the same but for the status it also returns. */
typedef cu_result (*resolve_v2_fn)(const char *name, void **function, int version, uint64_t flags, int *status);
typedef cu_result (*resolve_v1_fn)(const char *name, void **function, int version, uint64_t flags);

typedef struct resolver {
    void *handle; /* of the driver's library */
    resolve_v2_fn v2;
    resolve_v1_fn v1;
} resolver;

/* POSIX promises that a function's address survives this; ISO C has no cast for it. */
static void
assign(void *field, void *address)
{
    memcpy(field, &address, sizeof address);
}

static void *
find(const resolver *from, const char *name, int version, const char *exported)
{
    void *address = NULL;
    if (from->v2 != NULL && from->v2(name, &address, version, 0, NULL) == CU_OK && address != NULL) {
        return address;
    }
    address = NULL;
    if (from->v1 != NULL && from->v1(name, &address, version, 0) == CU_OK && address != NULL) {
        return address;
    }
    return dlsym(from->handle, exported);
}

/* The first library that opens.  What the loader says of the first name is the reason worth telling. */
static void *
open_library(void)
{
    for (size_t i = 0; i < sizeof library_names / sizeof *library_names; i++) {
        void *library = dlopen(library_names[i], RTLD_NOW | RTLD_LOCAL);
        if (library != NULL) {
            failure[0] = '\0';
            return library;
        }
        const char *text = dlerror();
        if (i == 0) {
            snprintf(failure, sizeof failure, "no CUDA driver: %s", text != NULL ? text : "libcuda.so.1 not found");
        }
    }
    return NULL;
}

static void
resolve_all(const resolver *from)
{
#define MP_CUDA_RESOLVE(name, version, exported, parameters)                                                          \
    {                                                                                                                 \
        void *address = find(from, #name, version, exported);                                                         \
        assign(&api.name, address);                                                                                   \
        if (address == NULL && failure[0] == '\0') {                                                                  \
            snprintf(failure, sizeof failure, "the CUDA driver is too old: it has no %s (CUDA %d.%d)", #name,         \
                     version / 1000, version % 1000 / 10);                                                            \
        }                                                                                                             \
    }
    MP_CUDA_SYMBOLS(MP_CUDA_RESOLVE)
#undef MP_CUDA_RESOLVE
}

static void
load(void)
{
    resolver from = {.handle = open_library()};
    if (from.handle == NULL) {
        return;
    }
    assign(&from.v2, dlsym(from.handle, "cuGetProcAddress_v2"));
    assign(&from.v1, dlsym(from.handle, "cuGetProcAddress"));
    resolve_all(&from);
    if (failure[0] != '\0') {
        /* Fail soft: no half-filled table, and no handle kept on a library that is of no use. */
        memset(&api, 0, sizeof api);
        dlclose(from.handle);
    }
}

const mp_cuda_api *
mp_cuda_load(const char **why)
{
    pthread_once(&load_once, load);
    *why = failure;
    return failure[0] == '\0' ? &api : NULL;
}

/* A symbol that only the simulated driver exports, or NULL.  The library stays loaded: whoever loaded it keeps it. */
static void *
simulator_symbol(const char *name)
{
    void *library = dlopen(library_names[0], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == NULL) {
        return NULL;
    }
    void *symbol = dlsym(library, name);
    dlclose(library);
    return symbol;
}

int
mp_cuda_is_simulated(void)
{
    return simulator_symbol("sim_reset") != NULL;
}

void *(*mp_cuda_simulated_stream(void))(void)
{
    void *(*stream)(void) = NULL;
    void *symbol = simulator_symbol("sim_current_stream");
    memcpy(&stream, &symbol, sizeof stream); /* ISO C has no cast from an object to a function pointer */
    return stream;
}
