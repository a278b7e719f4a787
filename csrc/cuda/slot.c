/* Takes slots from what was given back, or cuts them from slabs.  cuda/slot.h says what a slot is and when it is free.
 *
 * Functions whose names end in _lock_held are called with the device's lock, which the entry points take.
 */
#include "cuda/slot.h"

#include <stdlib.h>

#define SLOT_MIN 1024 /* 21 rows */

/* Slots are cut from slabs: a model has hundreds of tables, and a pinned allocation costs as much as many launches. */
#define SLAB_BYTES ((size_t)1024 * 1024)

/* ---- Memory ---- */

static mp_status
allocate(mp_device *device, size_t bytes, mp_slab *slab, mp_error *err)
{
    void *host = NULL;
    cu_deviceptr memory = 0;
    mp_status status = MP_CUDA(device, err, cuMemHostAlloc, &host, bytes, 0);
    if (status != MP_OK) {
        return status;
    }
    status = MP_CUDA(device, err, cuMemAlloc, &memory, bytes);
    if (status != MP_OK) {
        (void)device->api->cuMemFreeHost(host); /* the failure to tell is the first one */
        return status;
    }
    *slab = (mp_slab){host, memory, bytes};
    return MP_OK;
}

static mp_status
reserve_lock_held(mp_device *device, mp_error *err)
{
    return device->reserve.left > 0 ? MP_OK : allocate(device, SLAB_BYTES, &device->reserve, err);
}

int
mp_slot_reserved(mp_device *device)
{
    pthread_mutex_lock(&device->lock);
    const int reserved = device->reserve.left > 0;
    pthread_mutex_unlock(&device->lock);
    return reserved;
}

mp_status
mp_slot_reserve(mp_device *device, mp_error *err)
{
    pthread_mutex_lock(&device->lock);
    const mp_status status = reserve_lock_held(device, err);
    pthread_mutex_unlock(&device->lock);
    return status;
}

void
mp_slot_unreserve(mp_device *device)
{
    if (device->reserve.left > 0) {
        /* After a failure, which is the one to tell. */
        (void)device->api->cuMemFree(device->reserve.memory);
        (void)device->api->cuMemFreeHost(device->reserve.staging);
        device->reserve = (mp_slab){NULL, 0, 0};
    }
}

static void
cut(mp_slab *from, size_t bytes, mp_slot *slot)
{
    slot->staging = from->staging;
    slot->memory = from->memory;
    slot->bytes = bytes;
    from->staging += bytes;
    from->memory += bytes;
    from->left -= bytes;
}

/* Goes on with the reserve.  What is left of the slab before is too small and not used again. */
static void
use_reserve_lock_held(mp_device *device)
{
    device->slab = device->reserve;
    device->reserve = (mp_slab){NULL, 0, 0};
}

static mp_status
cut_new_lock_held(mp_device *device, size_t bytes, mp_slot *slot, mp_error *err)
{
    mp_slab own;
    mp_status status = reserve_lock_held(device, err);
    if (status == MP_OK && bytes > SLAB_BYTES) {
        status = allocate(device, bytes, &own, err);
        if (status == MP_OK) {
            cut(&own, bytes, slot);
        }
        return status;
    }
    if (status == MP_OK && device->slab.left < bytes) {
        use_reserve_lock_held(device);
        status = reserve_lock_held(device, err);
    }
    if (status == MP_OK) {
        cut(&device->slab, bytes, slot);
    }
    return status;
}

static size_t
slot_size(size_t bytes)
{
    size_t size = SLOT_MIN;
    while (size < bytes) {
        size *= 2;
    }
    return size;
}

/* ---- Slots that are used again ---- */

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

static void
destroy_events(mp_device *device, const mp_slot *slot)
{
    /* After a failure, which is the one to tell. */
    (void)device->api->cuEventDestroy(slot->uploaded);
    (void)device->api->cuEventDestroy(slot->used);
    (void)device->api->cuEventDestroy(slot->fence);
}

static mp_status
create_lock_held(mp_device *device, size_t size, mp_slot **out, mp_error *err)
{
    mp_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "out of memory for a descriptor table");
    }
    /* Events first: they can be taken back. */
    mp_status status = create_events(device, slot, err);
    if (status == MP_OK) {
        status = cut_new_lock_held(device, size, slot, err);
        if (status != MP_OK) {
            destroy_events(device, slot);
        }
    }
    if (status != MP_OK) {
        free(slot);
        return status;
    }
    *out = slot;
    return MP_OK;
}

mp_status
mp_slot_take(mp_device *device, size_t bytes, mp_slot **out, mp_error *err)
{
    const size_t size = slot_size(bytes);
    pthread_mutex_lock(&device->lock);
    mp_status status = take_used_lock_held(device, size, out, err);
    if (status == MP_OK && *out == NULL) {
        status = create_lock_held(device, size, out, err);
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

mp_status
mp_slot_take_captured(mp_device *device, size_t bytes, mp_slot **out, mp_error *err)
{
    const size_t size = slot_size(bytes);
    mp_status status = MP_OK;
    *out = NULL;
    mp_slot *slot = calloc(1, sizeof *slot);
    if (slot == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "out of memory for a descriptor table");
    }
    slot->captured = 1;
    pthread_mutex_lock(&device->lock);
    if (device->slab.left < size && device->reserve.left >= size) {
        use_reserve_lock_held(device);
    }
    if (device->slab.left >= size) {
        cut(&device->slab, size, slot);
        *out = slot;
    }
    else {
        status = mp_error_set(err, MP_ERR_DEVICE,
                              "no memory is left for the descriptor tables of a stream capture, and none may be "
                              "allocated now: run one warm-up step before each capture, device %d",
                              device->index);
    }
    pthread_mutex_unlock(&device->lock);
    if (status != MP_OK) {
        free(slot);
    }
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
