/* Knobs of the host backend that tests and benchmarks set; production code leaves the defaults. */
#ifndef DDP_MP_BACKEND_HOST_H
#define DDP_MP_BACKEND_HOST_H

#include <stddef.h>
#include <stdint.h>

/* Launches that move at most this many bytes run at once on the calling thread when the worker is idle: waking
 * the worker would cost more than the casts.  SIZE_MAX: always inline; 0: never.  Returns the previous value. */
size_t mp_host_set_inline_bytes(size_t bytes);

/* Chooses the instruction set by name (NULL: fastest).  Returns 0, or -1 when it cannot run here. */
int mp_host_set_isa(const char *name);
const char *mp_host_isa(void);

/* Launches that move at least this many bytes are written with non-temporal stores.  Returns the previous value. */
size_t mp_host_set_stream_bytes(size_t bytes);

/* Test hook: called on the worker before each run with `arg`; NULL: none.  Lets a test hold the stream. */
void mp_host_set_probe(void (*probe)(void *arg), void *arg);

/* Fault hook for tests: the nth call from now of any fallible entry of the backend fails with MP_ERR_DEVICE
 * (0: off).  Returns the calls counted since it was last set. */
uint64_t mp_host_fail_at(uint64_t nth);

#endif
