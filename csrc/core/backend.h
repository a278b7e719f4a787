/* The backend interface: everything the engine asks of a device.  The only header that backends share.
 *
 * A backend owns one private stream a device, for the life of the process, and runs multi-tensor operations
 * (row.h) either there or on a stream of the caller.  Nothing here knows Python.  Every function may be called
 * with or without the GIL; a backend locks what it shares.  Functions marked BLOCKS may wait for the device:
 * callers release the GIL around them.
 *
 * Errors: 0 is success, any other value is an mp_status; the text (call, code, device) is in *err, which is
 * always a valid, possibly truncated, NUL-terminated string after a failure.
 *
 * Native streams are passed as void*: the CUstream handle on CUDA (NULL is the legacy default stream), ignored on
 * the host, where the calling thread is the caller's stream.
 */
#ifndef DDP_MP_BACKEND_H
#define DDP_MP_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "core/row.h"

typedef enum mp_status {
    MP_OK = 0,
    MP_ERR_MEMORY = 1,      /* out of host memory */
    MP_ERR_DEVICE = 2,      /* the device or its driver reported an error */
    MP_ERR_UNAVAILABLE = 3, /* no such device or backend here */
    MP_ERR_FORKED = 4,      /* initialised in a parent process: cannot be used after fork */
    MP_ERR_ARGUMENT = 5,    /* a caller broke the contract of this header */
} mp_status;

typedef struct mp_error {
    mp_status status;
    char text[256];
} mp_error;

typedef struct mp_device mp_device; /* one device of one backend; never freed once opened */
typedef struct mp_event mp_event;   /* a pooled event of a device */

/* Counters since the device was opened.  Monotonic; read without a lock, so a snapshot may be torn between fields. */
typedef struct mp_counters {
    uint64_t launches;      /* runs (host) or kernels (CUDA) of rows, done or enqueued */
    uint64_t events;        /* event records */
    uint64_t waits;         /* waits asked of a caller's stream (host: that had to block) */
    uint64_t bytes_read;    /* bytes that launched rows read */
    uint64_t bytes_written; /* bytes that launched rows write */
} mp_counters;

typedef struct mp_backend {
    const char *name; /* "host" or "cuda" */

    /* Opens device `index`, or returns the one already open.  No driver call happens before the first open.
     * The result is borrowed and lives as long as the process. */
    mp_status (*open)(int index, mp_device **out, mp_error *err);

    /* The private stream's native handle (CUDA: a CUstream that PyTorch can wrap as an ExternalStream; host: NULL). */
    void *(*native_stream)(mp_device *device);

    /* Orders everything enqueued later on the private stream after all work now on the caller's stream. */
    mp_status (*order_after)(mp_device *device, void *caller_stream, mp_error *err);

    /* Runs `count` rows once with `divisor` on the private stream.  The rows are borrowed for the duration of the call;
     * the memory that they point to is in use until the run is complete.  A list without elements is legal.  After an
     * error some of the rows may have been enqueued. */
    mp_status (*launch)(mp_device *device, const mp_row *rows, size_t count, double divisor, mp_error *err);

    /* The same on the caller's stream.  Host: done when it returns.  BLOCKS on the host. */
    mp_status (*launch_on)(mp_device *device, const mp_row *rows, size_t count, double divisor, void *caller_stream,
                           mp_error *err);

    /* Takes an event from the pool and gives it back.  event_put(NULL) is ignored. */
    mp_status (*event_get)(mp_device *device, mp_event **out, mp_error *err);
    void (*event_put)(mp_event *event);

    /* Records the event on the private stream, replacing what it recorded before. */
    mp_status (*event_record)(mp_event *event, mp_error *err);

    /* Makes the caller's stream wait for the event.  An event never recorded is complete.  BLOCKS on the host. */
    mp_status (*event_wait)(mp_event *event, void *caller_stream, mp_error *err);

    /* *done = 1 when the recorded work is complete.  Not legal under stream capture. */
    mp_status (*event_query)(mp_event *event, int *done, mp_error *err);

    /* Waits on the calling thread until the recorded work is complete.  BLOCKS. */
    mp_status (*event_synchronize)(mp_event *event, mp_error *err);

    /* The native handle of the event (CUDA: CUevent; host: the address of its state). */
    void *(*event_native)(mp_event *event);

    /* Waits until the private stream is idle.  BLOCKS. */
    mp_status (*synchronize)(mp_device *device, mp_error *err);

    void (*counters)(mp_device *device, mp_counters *out);
} mp_backend;

extern const mp_backend mp_backend_host;
extern const mp_backend mp_backend_cuda; /* present in every build; open() says why CUDA is off */

/* Writes status and a printf-style text.  Returns status, so that a call site is one line. */
mp_status mp_error_set(mp_error *err, mp_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
