#include "backend_cuda.h"

#include <stdio.h>
#include <string.h>

#include "backend.h"

static mp_status
cuda_open(int index, mp_device **out, mp_error *err)
{
    const char *why;
    (void)index;
    *out = NULL;
    if (mp_cuda_load(&why) == NULL)
        return mp_error_set(err, MP_ERR_UNAVAILABLE, "%s", why);
    return mp_error_set(err, MP_ERR_UNAVAILABLE, "the CUDA backend is not complete yet");
}

void
mp_cuda_status(char *text, size_t size)
{
    snprintf(text, size, "not used yet");
}

int
mp_cuda_driver_version(void)
{
    return 0;
}

/* No device can be opened yet, so none of the other entries can be reached. */
const mp_backend mp_backend_cuda = {.abi = MP_BACKEND_ABI, .name = "cuda", .open = cuda_open};
