/* What the tests of the host backend share: rows, events, threads, and a worker that is held. */
#ifndef DDP_MP_TESTS_HOST_RIG_H
#define DDP_MP_TESTS_HOST_RIG_H

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "core/backend.h"
#include "host/backend.h"

static const mp_backend *const backend = &mp_backend_host;
extern mp_device *device; /* the only one; main opens it */
extern mp_error error;    /* of the last call that failed on the main thread */

#define OK(call) CHECK_EQ((call), MP_OK)

pthread_t spawn(void *(*start)(void *), void *arg);
void nap(long milliseconds);

/* ---- Rows, events, values ---- */

/* values[i] += one[i], so that the values count the runs. */
mp_row add_row(float *values, const float *one, int64_t numel);

/* float32 -> bfloat16 */
mp_row cast_row(const float *src, uint16_t *dst, int64_t numel);

mp_event *event_new(void);
int is_done(mp_event *event);
mp_counters counters_now(void);

/* Owned by the caller, who frees it. */
float *floats(size_t count, float value);
int all_equal(const float *values, size_t count, float value);

/* ---- A worker that is held ---- */

/* The worker comes in before every run and leaves when it is let go. */
typedef struct gate {
    sem_t entered, leave;
    pthread_t thread;
    char name[16];
    sigset_t mask;
} gate;

/* From now on every run goes to the worker, however small it is, and waits at the gate. */
void gate_close(gate *gate);

/* Takes the gate away and sets the bytes of a run at once.  Until now everything was let go that came in. */
void gate_open(gate *gate, size_t inline_bytes);

void gate_wait_entered(gate *gate);

/* A thread that waits. */
typedef struct waiter {
    mp_event *event; /* NULL: the device */
    atomic_int started, returned;
    mp_status status;
} waiter;

/* Its main function: `arg` is a waiter. */
void *waiter_main(void *arg);

#endif
