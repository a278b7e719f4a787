/* A stream on the host: runs in order, one after the other, on a worker thread that starts when first needed.
 *
 * A place in the stream is a number.  Runs are numbered from 1 as they are submitted; `mp_host_stream_last` is the
 * number of the newest, and everything up to n is complete once mp_host_stream_done(n).  An event is such a number.
 *
 * Whoever waits does not stand by: it takes pieces of the oldest run as the worker does, so that a wait costs no
 * wake-up and long runs use two processors.  The order stays: a run begins when the one before it is complete.
 */
#ifndef DDP_MP_HOST_STREAM_H
#define DDP_MP_HOST_STREAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "core/backend.h"
#include "host/run.h"

struct mp_host_job;

/* Everything but the two numbers is guarded by `lock`.  See host/stream.c for the order of locks. */
typedef struct mp_host_stream {
    pthread_mutex_t lock;
    pthread_cond_t work; /* the worker waits here */
    pthread_cond_t done; /* the others wait here for `complete` to move, or for the head to be at rest */
    _Atomic uint64_t submitted;
    _Atomic uint64_t complete;
    struct mp_host_job *head; /* the oldest incomplete run: the only one that pieces are taken from */
    struct mp_host_job *tail;
    unsigned waiting; /* threads that wait at `done` */
    unsigned frozen;  /* threads that fork: no piece may be taken */
    int worker;       /* the thread exists */
    int idle;         /* ... and waits at `work` */
    int held;         /* ... and is in the probe */
    void (*probe)(void *arg);
    void *probe_arg;
} mp_host_stream;

#define MP_HOST_STREAM_INIT                                                                                       \
    {                                                                                                             \
        .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER     \
    }

/* Submits a run, with a copy of its rows.  `at_once`: run it on the calling thread if nothing is pending, and return when
 * it is complete. */
mp_status mp_host_stream_submit(mp_host_stream *stream, const mp_host_run *run, int at_once, mp_error *err);

/* The number of the newest run. */
static inline uint64_t
mp_host_stream_last(mp_host_stream *stream)
{
    return atomic_load_explicit(&stream->submitted, memory_order_acquire);
}

/* Whether all runs up to this number are complete and their writes visible. */
static inline int
mp_host_stream_done(mp_host_stream *stream, uint64_t number)
{
    return atomic_load_explicit(&stream->complete, memory_order_acquire) >= number;
}

/* Returns when all runs up to this number are complete.  BLOCKS. */
void mp_host_stream_wait(mp_host_stream *stream, uint64_t number);

/* Makes sure that what is pending will be run though nobody waits for it. */
void mp_host_stream_kick(mp_host_stream *stream);

/* The probe is called on the worker before each run that it begins; only the worker begins runs while there is one. */
void mp_host_stream_set_probe(mp_host_stream *stream, void (*probe)(void *arg), void *arg);

/* To be called around fork().  The first brings the stream to rest between two pieces and keeps it locked. */
void mp_host_stream_before_fork(mp_host_stream *stream);
void mp_host_stream_after_fork_parent(mp_host_stream *stream);
void mp_host_stream_after_fork_child(mp_host_stream *stream);

#endif
