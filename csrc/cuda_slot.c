#include "cuda_slot.h"

#include <stdlib.h>

#define SLOT_MIN 4096 /* 85 rows */
#define SLAB_BYTES (256 * 1024)

mp_status
mp_slot_poll(mp_device *device, cu_event event, int *pending, mp_error *err)
{
    if (!*pending) {
        return MP_OK;
    }
    const cu_result code = device->api->cuEventQuery(event);
    if (code == CU_NOT_READY) {
        return MP_OK;
    }
    *pending = 0;
    return mp_cuda_check(device->api, "cuEventQuery", code, device->index, err);
}

/* *idle = 1 when nothing reads or writes the slot any more. */
static mp_status
poll_slot(mp_device *device, mp_slot *slot, int *idle, mp_error *err)
{
    mp_status status = MP_OK;
    *idle = 0;
    if (slot->private_reads) {
        /* The fence is recorded only now: a steady step pays for no event, and giving back makes no driver call. */
        int capturing;
        status = mp_cuda_capturing(device, device->stream, &capturing, err);
        if (status != MP_OK || capturing) {
            return status; /* an event recorded under capture could not be asked afterwards */
        }
        status = MP_CUDA(device, err, cuEventRecord, slot->fence, device->stream);
        if (status != MP_OK) {
            return status;
        }
        slot->private_reads = 0;
        slot->fenced = 1;
    }
    if ((status = mp_slot_poll(device, slot->fence, &slot->fenced, err)) != MP_OK ||
        (status = mp_slot_poll(device, slot->used, &slot->in_use, err)) != MP_OK ||
        (status = mp_slot_poll(device, slot->uploaded, &slot->uploading, err)) != MP_OK) {
        return status;
    }
    *idle = !slot->fenced && !slot->in_use && !slot->uploading;
    return MP_OK;
}

/* Takes the oldest slot of that size out of the queue if it is idle.  Those behind it were given back later. */
static mp_status
take_used_lock_held(mp_device *device, size_t bytes, mp_slot **out, mp_error *err)
{
    mp_slot *before = NULL, *slot = device->slots;
    *out = NULL;
    while (slot != NULL && slot->bytes != bytes) {
        before = slot;
        slot = slot->next;
    }
    if (slot == NULL) {
        return MP_OK;
    }
    int idle;
    const mp_status status = poll_slot(device, slot, &idle, err);
    if (status != MP_OK || !idle) {
        return status;
    }
    if (before == NULL) {
        device->slots = slot->next;
    }
    else {
        before->next = slot->next;
    }
    if (device->slots_last == slot) {
        device->slots_last = before;
    }
    slot->next = NULL;
    *out = slot;
    return MP_OK;
}

/* Slots are cut from slabs: a model has hundreds of tables, and every pinned allocation costs as much as many launches.
 * What is left of a slab when a larger one is needed is not used again. */
static mp_status
cut_slab_lock_held(mp_device *device, size_t bytes, mp_slot *slot, mp_error *err)
{
    if (device->slab_left < bytes) {
        const size_t size = bytes > SLAB_BYTES ? bytes : SLAB_BYTES;
        void *host = NULL;
        cu_deviceptr memory = 0;
        mp_status status = MP_CUDA(device, err, cuMemHostAlloc, &host, size, 0);
        if (status != MP_OK) {
            return status;
        }
        status = MP_CUDA(device, err, cuMemAlloc, &memory, size);
        if (status != MP_OK) {
            (void)device->api->cuMemFreeHost(host); /* the failure to tell is the first one */
            return status;
        }
        device->host_slab = host;
        device->device_slab = memory;
        device->slab_left = size;
    }
    slot->staging = device->host_slab;
    slot->memory = device->device_slab;
    slot->bytes = bytes;
    device->host_slab += bytes;
    device->device_slab += bytes;
    device->slab_left -= bytes;
    return MP_OK;
}

static mp_status
create_events(mp_device *device, mp_slot *slot, mp_error *err)
{
    cu_event *const events[] = {&slot->uploaded, &slot->used, &slot->fence};
    for (size_t i = 0; i < 3; i++) {
        const mp_status status = MP_CUDA(device, err, cuEventCreate, events[i], CU_EVENT_NO_TIMING);
        if (status != MP_OK) {
            while (i-- > 0) {
                (void)device->api->cuEventDestroy(*events[i]); /* the failure to tell is the first one */
            }
            return status;
        }
    }
    return MP_OK;
}

mp_status
mp_slot_take(mp_device *device, size_t bytes, mp_slot **out, mp_error *err)
{
    size_t size = SLOT_MIN;
    while (size < bytes) {
        size *= 2;
    }
    *out = NULL;
    pthread_mutex_lock(&device->lock);
    mp_status status = take_used_lock_held(device, size, out, err);
    if (status != MP_OK || *out != NULL) {
        goto done;
    }
    mp_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) {
        status = mp_error_set(err, MP_ERR_MEMORY, "out of memory");
        goto done;
    }
    /* Events first: they can be taken back. */
    status = create_events(device, slot, err);
    if (status == MP_OK) {
        status = cut_slab_lock_held(device, size, slot, err);
        if (status != MP_OK) {
            (void)device->api->cuEventDestroy(slot->uploaded);
            (void)device->api->cuEventDestroy(slot->used);
            (void)device->api->cuEventDestroy(slot->fence);
        }
    }
    if (status != MP_OK) {
        free(slot);
        goto done;
    }
    *out = slot;
done:
    pthread_mutex_unlock(&device->lock);
    return status;
}

void
mp_slot_give(mp_device *device, mp_slot *slot)
{
    if (slot == NULL) {
        return;
    }
    pthread_mutex_lock(&device->lock);
    if (slot->captured) {
        slot->next = device->slots_kept;
        device->slots_kept = slot;
    }
    else {
        slot->next = NULL;
        *(device->slots_last != NULL ? &device->slots_last->next : &device->slots) = slot;
        device->slots_last = slot;
    }
    pthread_mutex_unlock(&device->lock);
}
