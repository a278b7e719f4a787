/* Slots: where a descriptor table lies on the device, with the pinned memory that it is sent from.
 *
 * A slot is written by the host, copied to the device on one stream and read by launches on several.  It may be
 * written again only when all of that is over, which is never waited for: a slot that is given back joins a queue,
 * and is taken from there once its events have completed; otherwise a new one is cut from a slab.  Nothing in use is
 * freed, since cuMemFree may wait for the device; what is held is bounded by what was in use at one time.
 *
 * A slot that a graph captured is kept as it is for good: the graph may be replayed at any time.  One slab is always
 * held in reserve, so that slots can be cut under capture, where nothing may be allocated.
 */
#ifndef DDP_MP_CUDA_SLOT_H
#define DDP_MP_CUDA_SLOT_H

#include "cuda/device.h"

typedef struct mp_slot {
    struct mp_slot *next;
    size_t bytes; /* capacity, a power of two */
    void *staging;
    cu_deviceptr memory;

    /* Each event is meaningful while its flag is set: recorded and not known to be complete. */
    cu_event uploaded; /* after the copy */
    cu_event used;     /* after the last launch on a caller's stream; stands for those before it too */
    cu_event fence;    /* on the private stream, after the last launch there */
    int uploading;
    int in_use;
    int fenced;

    int private_reads;    /* launched on the private stream, and no fence recorded since */
    int caller_upload;    /* the copy was made on a caller's stream */
    int captured;         /* a graph reads it, or nobody can tell whether it is read: never written again */
    int captured_upload;  /* the copy too is part of a graph: outside that, the memory holds nothing */
    cu_stream last_stream; /* of the launch that `used` was recorded after; under capture, of the copy */
} mp_slot;

/* Whether there is a reserve.  A capture may have used it up. */
int mp_slot_reserved(mp_device *device);

/* Allocates the reserve if there is none.  The context is current, and the thread may allocate and ask (see
 * mp_cuda_relax). */
mp_status mp_slot_reserve(mp_device *device, mp_error *err);

/* Frees the reserve of a device that nothing has used yet. */
void mp_slot_unreserve(mp_device *device);

/* A slot of at least this size that nothing uses any more, contents undefined.  The same conditions. */
mp_status mp_slot_take(mp_device *device, size_t bytes, mp_slot **out, mp_error *err);

/* The same for a graph, without any driver call.  The slot has no events and is `captured` from the start. */
mp_status mp_slot_take_captured(mp_device *device, size_t bytes, mp_slot **out, mp_error *err);

/* Gives a slot back, in use or not; a captured one is only kept.  Makes no driver call.  NULL is ignored. */
void mp_slot_give(mp_device *device, mp_slot *slot);

/* Clears *pending when the event has completed. */
mp_status mp_slot_poll(mp_device *device, cu_event event, int *pending, mp_error *err);

#endif
