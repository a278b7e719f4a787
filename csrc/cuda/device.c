/* The driver in this process: initialised once, dead after a fork; and the context that every call is made in. */
#include "cuda/device.h"

#include <unistd.h>

static atomic_int driver_version;

/* The process that called cuInit, 0 before that.  The driver does not survive a fork: some of its calls hang there. */
static atomic_int owner;

/* ---- Errors ---- */

mp_status
mp_cuda_fail(const mp_cuda_api *api, const char *call, cu_result code, int index, mp_error *err)
{
    const char *name = NULL, *text = NULL;
    if (api->cuGetErrorName(code, &name) != CU_OK || name == NULL) {
        name = "unknown error";
    }
    if (api->cuGetErrorString(code, &text) != CU_OK || text == NULL) {
        text = "the driver has no text for it";
    }
    return mp_error_set(err, MP_ERR_DEVICE, "%s failed: %s (%d): %s, device %d", call, name, code, text, index);
}

static mp_status
fail_forked(mp_error *err)
{
    return mp_error_set(err, MP_ERR_FORKED,
                        "CUDA was initialised before this process was forked and cannot be used in it: start worker "
                        "processes with the \"spawn\" or \"forkserver\" method");
}

/* ---- The process ---- */

mp_status
mp_cuda_check_fork(mp_error *err)
{
    const int initialised = atomic_load_explicit(&owner, memory_order_relaxed);
    return initialised == 0 || initialised == (int)getpid() ? MP_OK : fail_forked(err);
}

mp_status
mp_cuda_initialise(const mp_cuda_api *api, int index, mp_error *err)
{
    const int self = (int)getpid();
    if (atomic_load(&owner) == self) {
        return MP_OK;
    }
    atomic_store(&owner, self); /* before the call: a fork in the middle of it must be told apart too */
    int version = 0;
    const char *call = "cuInit";
    cu_result code = api->cuInit(0);
    if (code == CU_OK) {
        call = "cuDriverGetVersion";
        code = api->cuDriverGetVersion(&version);
    }
    if (code == CU_OK) {
        atomic_store(&driver_version, version);
        return MP_OK;
    }
    atomic_store(&owner, 0);
    if (code == CU_NOT_INITIALIZED) {
        return fail_forked(err); /* another library had initialised the driver in the parent */
    }
    (void)mp_cuda_fail(api, call, code, index, err);
    if (code == CU_NO_DEVICE || code == CU_STUB_LIBRARY) {
        err->status = MP_ERR_UNAVAILABLE;
    }
    return err->status;
}

int
mp_cuda_driver_version(void)
{
    return atomic_load(&driver_version);
}

/* ---- The context ---- */

mp_status
mp_cuda_enter(mp_device *device, mp_error *err)
{
    const mp_status status = mp_cuda_check_fork(err);
    return status != MP_OK ? status : MP_CUDA(device, err, cuCtxPushCurrent, device->context);
}

mp_status
mp_cuda_leave(mp_device *device, mp_status status, mp_error *err)
{
    cu_context popped;
    const cu_result code = device->api->cuCtxPopCurrent(&popped);
    return status != MP_OK ? status : mp_cuda_check(device->api, "cuCtxPopCurrent", code, device->index, err);
}
