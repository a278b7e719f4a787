/* The CUDA backend: devices, streams and events.  Launches are in cuda/launch.c.
 *
 * Streams are the callers' raw handles, NULL the legacy default stream; nothing here assumes which one is current.  The
 * primary context is pushed for the time of every call, so that whatever the caller had current stays so.
 */
#include "cuda/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "cuda/device.h"
#include "cuda/image.h"
#include "cuda/launch.h"

#define MAX_DEVICES 64
#define OLDEST_CAPABILITY 75

static mp_device *_Atomic devices[MAX_DEVICES]; /* never freed */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER; /* one open at a time; before any device's lock */

/* Guards `last`, which the last open wrote. */
static pthread_mutex_t status_lock = PTHREAD_MUTEX_INITIALIZER;
static char last[256];

/* ---- Opening ---- */

/* With the context current.  What it made is undone by tear_down. */
static mp_status
set_up_lock_held(mp_device *device, cu_device handle, int capability, mp_error *err)
{
    mp_status status = MP_CUDA(device, err, cuStreamCreateWithPriority, &device->stream, CU_STREAM_IS_NON_BLOCKING,
                               MP_CUDA_STREAM_PRIORITY);
    if (status == MP_OK) {
        status = mp_cuda_module_load(device->api, device->index, capability, &device->module, &device->kernel,
                                     device->note, sizeof device->note, err);
    }
    return status != MP_OK ? status : mp_cuda_choose_grid(device, handle, capability, err);
}

/* After a failure, which is the one to tell. */
static void
tear_down(mp_device *device, cu_device handle)
{
    cu_context popped;
    const int entered = device->api->cuCtxPushCurrent(device->context) == CU_OK;
    if (device->module != NULL) {
        (void)device->api->cuModuleUnload(device->module);
    }
    if (device->stream != NULL) {
        (void)device->api->cuStreamDestroy(device->stream);
    }
    if (entered) {
        (void)device->api->cuCtxPopCurrent(&popped);
    }
    (void)device->api->cuDevicePrimaryCtxRelease(handle);
}

static mp_status
find_device(mp_device *device, cu_device *handle, int *capability, mp_error *err)
{
    int count = 0, major = 0, minor = 0;
    mp_status status = MP_CUDA(device, err, cuDeviceGetCount, &count);
    if (status != MP_OK) {
        return status;
    }
    if (device->index >= count) {
        return mp_error_set(err, MP_ERR_UNAVAILABLE, "there is no CUDA device %d: the driver shows %d", device->index,
                            count);
    }
    if ((status = MP_CUDA(device, err, cuDeviceGet, handle, device->index)) != MP_OK ||
        (status = MP_CUDA(device, err, cuDeviceGetAttribute, &major, CU_ATTRIBUTE_CC_MAJOR, *handle)) != MP_OK ||
        (status = MP_CUDA(device, err, cuDeviceGetAttribute, &minor, CU_ATTRIBUTE_CC_MINOR, *handle)) != MP_OK) {
        return status;
    }
    *capability = 10 * major + minor;
    if (*capability < OLDEST_CAPABILITY) {
        return mp_error_set(err, MP_ERR_UNAVAILABLE,
                            "CUDA device %d has compute capability %d.%d; the oldest supported is %d.%d",
                            device->index, major, minor, OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10);
    }
    return MP_OK;
}

static mp_status
open_device_lock_held(mp_device *device, mp_error *err)
{
    cu_device handle = 0;
    int capability = 0;
    mp_status status = mp_cuda_initialise(device->api, device->index, err);
    if (status == MP_OK) {
        status = find_device(device, &handle, &capability, err);
    }
    if (status == MP_OK) {
        status = MP_CUDA(device, err, cuDevicePrimaryCtxRetain, &device->context, handle);
    }
    if (status != MP_OK) {
        return status;
    }
    status = mp_cuda_enter(device, err);
    if (status == MP_OK) {
        status = mp_cuda_leave(device, set_up_lock_held(device, handle, capability, err), err);
    }
    if (status != MP_OK) {
        tear_down(device, handle);
    }
    return status;
}

static mp_device *
device_new(const mp_cuda_api *api, int index)
{
    mp_device *device = calloc(1, sizeof *device);
    if (device != NULL) {
        device->api = api;
        device->index = index;
        pthread_mutex_init(&device->lock, NULL);
    }
    return device;
}

static mp_status
open_lock_held(const mp_cuda_api *api, int index, mp_device **out, mp_error *err)
{
    *out = atomic_load(&devices[index]);
    if (*out != NULL) {
        return MP_OK;
    }
    mp_device *device = device_new(api, index);
    if (device == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "out of memory for CUDA device %d", index);
    }
    const mp_status status = open_device_lock_held(device, err);
    if (status != MP_OK) {
        pthread_mutex_destroy(&device->lock);
        free(device);
        return status;
    }
    atomic_store(&devices[index], device);
    *out = device;
    return MP_OK;
}

static void
write_status(const char *text)
{
    pthread_mutex_lock(&status_lock);
    snprintf(last, sizeof last, "%s", text);
    pthread_mutex_unlock(&status_lock);
}

static mp_status
cuda_open(int index, mp_device **out, mp_error *err)
{
    const char *why;
    *out = NULL;
    const mp_cuda_api *api = mp_cuda_load(&why);
    if (api == NULL) {
        write_status(why);
        return mp_error_set(err, MP_ERR_UNAVAILABLE, "%s", why);
    }
    mp_status status = mp_cuda_check_fork(err); /* before the lock: a child may find it held for ever */
    if (status != MP_OK) {
        return status;
    }
    if (index < 0 || index >= MAX_DEVICES) {
        return mp_error_set(err, MP_ERR_UNAVAILABLE, "there is no CUDA device %d", index);
    }
    *out = atomic_load(&devices[index]);
    if (*out != NULL) {
        return MP_OK;
    }
    pthread_mutex_lock(&open_lock);
    status = open_lock_held(api, index, out, err);
    pthread_mutex_unlock(&open_lock);
    write_status(status == MP_OK ? "" : err->text);
    return status;
}

void
mp_cuda_status(char *text, size_t size)
{
    const int version = mp_cuda_driver_version();
    int length = 0, open = 0;
    if (size > 0) {
        text[0] = '\0';
    }
    for (int i = 0; i < MAX_DEVICES && (size_t)length < size; i++) {
        const mp_device *device = atomic_load(&devices[i]);
        if (device != NULL) {
            length += snprintf(text + length, size - (size_t)length, "%sdevice %d: %s", open ? "; " : "", i,
                               device->note);
            open++;
        }
    }
    if ((size_t)length >= size) {
        return;
    }
    pthread_mutex_lock(&status_lock);
    if (last[0] != '\0') {
        snprintf(text + length, size - (size_t)length, "%s%s", open ? "; last failure: " : "off: ", last);
    }
    else if (open == 0) {
        snprintf(text + length, size - (size_t)length, "%s", version ? "no device open" : "not used yet");
    }
    pthread_mutex_unlock(&status_lock);
}

/* ---- Streams ---- */

static void *
cuda_native_stream(mp_device *device)
{
    return device->stream;
}

static mp_status
cuda_synchronize(mp_device *device, mp_error *err)
{
    const mp_status status = mp_cuda_enter(device, err);
    if (status != MP_OK) {
        return status;
    }
    return mp_cuda_leave(device, MP_CUDA(device, err, cuStreamSynchronize, device->stream), err);
}

/* ---- Events ---- */

static mp_event *
pool_take(mp_device *device)
{
    pthread_mutex_lock(&device->lock);
    mp_event *event = device->events;
    if (event != NULL) {
        device->events = event->next;
    }
    pthread_mutex_unlock(&device->lock);
    return event;
}

static mp_status
event_create(mp_device *device, mp_event **out, mp_error *err)
{
    mp_event *event = calloc(1, sizeof *event);
    if (event == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "out of memory for an event");
    }
    event->device = device;
    mp_status status = mp_cuda_enter(device, err);
    if (status == MP_OK) {
        status = MP_CUDA(device, err, cuEventCreate, &event->handle, CU_EVENT_NO_TIMING);
        const int created = status == MP_OK;
        status = mp_cuda_leave(device, status, err);
        if (created && status != MP_OK) {
            (void)device->api->cuEventDestroy(event->handle); /* the failure to tell is the first one */
        }
    }
    if (status != MP_OK) {
        free(event);
        return status;
    }
    *out = event;
    return MP_OK;
}

static mp_status
cuda_event_get(mp_device *device, mp_event **out, mp_error *err)
{
    *out = NULL;
    mp_status status = mp_cuda_check_fork(err);
    if (status != MP_OK) {
        return status;
    }
    *out = pool_take(device);
    if (*out == NULL) {
        status = event_create(device, out, err);
    }
    return status;
}

/* Work that was recorded may be pending: whoever waits for it took its place when the wait was asked for. */
static void
cuda_event_put(mp_event *event)
{
    mp_error ignored;
    if (event == NULL || mp_cuda_check_fork(&ignored) != MP_OK) {
        return; /* a forked child lets the parent's event be */
    }
    atomic_store_explicit(&event->recorded, 0, memory_order_relaxed);
    pthread_mutex_lock(&event->device->lock);
    event->next = event->device->events;
    event->device->events = event;
    pthread_mutex_unlock(&event->device->lock);
}

static mp_status
cuda_event_record(mp_event *event, mp_error *err)
{
    mp_device *device = event->device;
    mp_status status = mp_cuda_enter(device, err);
    if (status != MP_OK) {
        return status;
    }
    status = mp_cuda_leave(device, MP_CUDA(device, err, cuEventRecord, event->handle, device->stream), err);
    if (status == MP_OK) {
        atomic_store_explicit(&event->recorded, 1, memory_order_release);
        atomic_fetch_add_explicit(&device->records, 1, memory_order_relaxed);
    }
    return status;
}

static int
is_recorded(mp_event *event)
{
    return atomic_load_explicit(&event->recorded, memory_order_acquire);
}

static mp_status
cuda_event_wait(mp_event *event, void *caller_stream, mp_error *err)
{
    mp_device *device = event->device;
    mp_status status = mp_cuda_check_fork(err);
    if (status != MP_OK || !is_recorded(event)) {
        return status;
    }
    status = mp_cuda_enter(device, err);
    if (status != MP_OK) {
        return status;
    }
    status = MP_CUDA(device, err, cuStreamWaitEvent, (cu_stream)caller_stream, event->handle, 0);
    status = mp_cuda_leave(device, status, err);
    if (status == MP_OK) {
        atomic_fetch_add_explicit(&device->waits, 1, memory_order_relaxed);
    }
    return status;
}

static mp_status
cuda_event_query(mp_event *event, int *done, mp_error *err)
{
    mp_device *device = event->device;
    *done = 0;
    mp_status status = mp_cuda_enter(device, err);
    if (status != MP_OK) {
        return status;
    }
    if (!is_recorded(event)) {
        *done = 1;
    }
    else {
        const cu_result code = device->api->cuEventQuery(event->handle);
        *done = code == CU_OK;
        if (code != CU_NOT_READY) {
            status = mp_cuda_check(device->api, "cuEventQuery", code, device->index, err);
        }
    }
    return mp_cuda_leave(device, status, err);
}

static mp_status
cuda_event_synchronize(mp_event *event, mp_error *err)
{
    mp_device *device = event->device;
    mp_status status = mp_cuda_enter(device, err);
    if (status != MP_OK) {
        return status;
    }
    if (is_recorded(event)) {
        status = MP_CUDA(device, err, cuEventSynchronize, event->handle);
    }
    return mp_cuda_leave(device, status, err);
}

static void *
cuda_event_native(mp_event *event)
{
    return event->handle;
}

/* ---- Order ---- */

/* Two calls and nothing to wait for: an event on the caller's stream, which the private stream waits for.  The wait
 * takes the record as it is now, so the event goes back at once.  Under capture this makes the private stream part of
 * the graph. */
static mp_status
cuda_order_after(mp_device *device, void *caller_stream, mp_error *err)
{
    mp_event *event;
    mp_status status = cuda_event_get(device, &event, err);
    if (status != MP_OK) {
        return status;
    }
    status = mp_cuda_enter(device, err);
    if (status == MP_OK) {
        status = MP_CUDA(device, err, cuEventRecord, event->handle, (cu_stream)caller_stream);
        if (status == MP_OK) {
            status = MP_CUDA(device, err, cuStreamWaitEvent, device->stream, event->handle, 0);
        }
        status = mp_cuda_leave(device, status, err);
    }
    cuda_event_put(event);
    return status;
}

static void
cuda_counters(mp_device *device, mp_counters *out)
{
    out->launches = atomic_load_explicit(&device->launches, memory_order_relaxed);
    out->events = atomic_load_explicit(&device->records, memory_order_relaxed);
    out->waits = atomic_load_explicit(&device->waits, memory_order_relaxed);
    out->bytes_read = atomic_load_explicit(&device->bytes_read, memory_order_relaxed);
    out->bytes_written = atomic_load_explicit(&device->bytes_written, memory_order_relaxed);
}

const mp_backend mp_backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .native_stream = cuda_native_stream,
    .order_after = cuda_order_after,
    .launch = mp_cuda_launch,
    .launch_on = mp_cuda_launch_on,
    .event_get = cuda_event_get,
    .event_put = cuda_event_put,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_query = cuda_event_query,
    .event_synchronize = cuda_event_synchronize,
    .event_native = cuda_event_native,
    .synchronize = cuda_synchronize,
    .counters = cuda_counters,
};
