/* What the tests of the CUDA backend share: the simulated driver by name, memory as a framework would hold it, a row to
 * cast, one step of training, and the pool of events.
 */
#ifndef DDP_MP_TESTS_CUDA_RIG_H
#define DDP_MP_TESTS_CUDA_RIG_H

#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "core/backend.h"
#include "cuda/backend.h"
#include "simcuda.h"

/* ---- The simulator, by name ---- */

typedef struct driver {
    int (*cuStreamCreate)(void **stream, unsigned flags);
    int (*cuStreamBeginCapture)(void *stream, int mode);
    int (*cuStreamEndCapture)(void *stream, void **graph);
    int (*cuCtxGetCurrent)(void **context);
    int (*cuCtxPushCurrent)(void *context);
    int (*cuCtxPopCurrent)(void **context);
    int (*cuDevicePrimaryCtxRetain)(void **context, int device);
    int (*cuGraphInstantiate)(void **exec, void *graph, unsigned long long flags);
    int (*cuGraphLaunch)(void *exec, void *stream);
    int (*cuStreamSynchronize)(void *stream);
    void (*begin)(int schedule, uint64_t seed);
    const char *(*report)(void);
    int (*report_count)(const char *kind);
    int (*live)(const char *kind);
    uint64_t (*calls)(const char *api);
    uint64_t (*blocking)(void);
    void (*fault)(const char *api, uint64_t nth, int code, uint64_t times);
    void (*fault_kernel)(uint64_t nth, int code);
    void (*set_devices)(const char *capabilities);
    uint64_t (*forked_calls)(void);
    void (*own)(void *base, size_t bytes, const char *label, int device);
    void (*disown)(void *base);
    int (*work)(void *stream, const sim_range *ranges, size_t count, void *into, const void *data, size_t bytes,
                const char *label);
    int (*access)(void *stream, const sim_range *ranges, size_t count, const char *label);
    int (*enter)(void *stream);
} driver;

extern driver sim;
static const mp_backend *const backend = &mp_backend_cuda;
extern mp_device *device; /* device 0, once it is open; borrowed from the backend */
extern mp_error error;    /* of the last call that failed on the main thread */

#define OK(call)                                                                                                      \
    do {                                                                                                              \
        error.text[0] = '\0';                                                                                         \
        CHECK_EQ((call), MP_OK);                                                                                      \
        if (error.text[0] != '\0') {                                                                                  \
            fprintf(stderr, "  %s\n", error.text);                                                                    \
        }                                                                                                             \
    } while (0)

/* The ways in which a device may run what is queued; each test that depends on order tries them all. */
enum { SCHEDULES = 5 };
extern const int schedules[SCHEDULES];

/* Loads the simulated driver and the image from these files; the program ends where that fails. */
void load_simulator(const char *path);
void load_image(const char *path);

/* Sets how many bytes of the image the backend sees and returns how many it saw. */
size_t set_image_size(size_t size);

/* What the simulator has to report, such as a race, fails the test. */
void expect_clean(void);

/* After what succeeded although its nth call was to fail: it made fewer calls, so that no failure was passed over. */
void expect_fault_to_come(const char *function, uint64_t nth, uint64_t calls_before);

/* ---- Memory of a framework ---- */

/* Memory that the simulator knows as the device's.  Owned by the caller, who gives it to release(). */
void *device_memory(size_t bytes, const char *label);
void release(void *memory);

/* A stream of device 0, whose context is current afterwards. */
void *new_stream(void);

/* A float32 -> bfloat16 row, the values that it reads and where they go. */
#define COUNT 3000
typedef struct fixture {
    float *master;
    uint16_t *low;
    mp_row row; /* which tests change */
} fixture;

void fixture_init(fixture *f);
void fixture_fini(fixture *f); /* waits for the device first */

/* Launches the row on the private stream, or on the caller's. */
mp_status launch(const fixture *f);
mp_status launch_on(const fixture *f, void *stream);

/* Queues `value` for every master on the stream, as an optimizer would write it. */
void write_masters(const fixture *f, void *stream, float value);

/* Queues a read of what was cast, as a layer's kernel would, and returns the last value. */
float read_low(const fixture *f, void *stream);

/* A step of training: masters are written, cast on the private stream, and read on `stream` after an event. */
void one_step(fixture *f, void *stream, float value);

/* ---- Events ---- */

/* At most so many events are in the pool. */
enum { POOL = 256 };

/* Empties the pool of events, so that the next one is made anew, and returns how many were taken.  They belong to the
 * caller, who puts them back. */
size_t drain_events(mp_event **taken);

#endif
