/* Control surface of the simulated driver, exported by its libcuda.so.1 next to the cu* functions.
 *
 * A test chooses a schedule, runs code that believes to have a device, and reads what was wrong with it.  Text that is
 * returned belongs to the simulator and is valid until the calling thread asks for text again.
 */
#ifndef SIMCUDA_H
#define SIMCUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum sim_schedule {
    SIM_EAGER = 0,  /* every operation runs at its call */
    SIM_LAZY = 1,   /* nothing runs before the host waits, and then only what that wait needs */
    SIM_RANDOM = 2, /* some ready stream advances at every call, by seed */
    SIM_THREAD = 3, /* a background thread runs ready streams; the only schedule that does not replay exactly */
};

#define SIM_HOST ((void *)~(uintptr_t)0) /* stands for the host where a stream is expected */

/* Forgets everything, live objects too; their handles die. */
void sim_reset(int schedule, uint64_t seed);
/* Begins a test in a process whose live objects stay: waits for all work, clears errors, reports, counts and faults. */
void sim_begin(int schedule, uint64_t seed);

/* --- what was wrong ------------------------------------------------------------------------------------------- */
const char *sim_report(void);           /* a line a finding; "" when clean */
int sim_report_count(const char *kind); /* RACE, USE-AFTER-FREE, INTRA-KERNEL, MISUSE, ...; "*": all */
int sim_live(const char *kind);         /* contexts streams events modules graphs execs device pinned pending */
const char *sim_leaks(void);            /* "streams=1 events=2"; "" when nothing is alive */
uint64_t sim_forked_calls(void);        /* driver calls in forked children, counted across processes */

/* --- what was done -------------------------------------------------------------------------------------------- */
uint64_t sim_calls(const char *api);        /* calls of one function, without its version suffix; "*": all */
const char *sim_call_log(void);             /* "cuInit=1 cuLaunchKernel=3": every function called */
uint64_t sim_blocking_calls(void);          /* calls that waited for the device, or might have */
uint64_t sim_gil_blocks(void);              /* of those, made while the probe returned non-zero */
void sim_set_gil_probe(int (*probe)(void)); /* PyGILState_Check */
uint64_t sim_executed(const char *kernel, const char *mnemonic); /* instructions; prefixes match, "*": all */
const char *sim_executed_log(const char *kernel);                /* "ld.global.v4.b32=12 ..." */

/* --- what goes wrong ------------------------------------------------------------------------------------------ */
/* The nth to (nth + times - 1)th call of `api` ("*": any function) from now returns the CUresult. */
void sim_fault(const char *api, uint64_t nth, int code, uint64_t times);
void sim_fault_kernel(uint64_t nth, int code); /* the nth launch from now fails when it runs; sticky */
void sim_set_memory_limit(size_t bytes);
void sim_delay(const char *label_part, int microseconds); /* such work runs last; THREAD: and starts late */

/* --- what the machine is -------------------------------------------------------------------------------------- */
/* Also set by the environment when the library is loaded: SIMCUDA_DEVICES, SIMCUDA_DRIVER_VERSION, SIMCUDA_HIDE,
 * SIMCUDA_HOST_MEMORY. */
void sim_set_devices(const char *capabilities); /* "90,75": two devices */
void sim_set_driver_version(int version);       /* 12040: newer functions and PTX versions are missing */
void sim_hide(const char *functions);           /* "cuLaunchKernelEx,cuMemAllocAsync": cuGetProcAddress misses them */
void sim_set_host_memory(int is_device_memory); /* 1: kernels may touch any host memory */

/* --- memory and work of others (the framework) ----------------------------------------------------------------- */
void sim_register(void *base, size_t bytes, const char *label, int device); /* device -1: any */
void sim_unregister(void *base);
void sim_name_stream(void *stream, const char *name);

typedef struct sim_range {
    const void *base;
    size_t bytes;
    int write;
} sim_range;

/* Queues work on a stream that touches the ranges; when `data` is not NULL it is copied into `into` then. */
int sim_work(void *stream, const sim_range *ranges, size_t count, void *into, const void *data, size_t bytes,
             const char *label);
/* The calling thread acts as the stream: runs what the stream was ordered after, and nothing else. */
int sim_enter(void *stream);
/* Books what it just did as the stream's (or, with SIM_HOST, the host's) access. */
int sim_access(void *stream, const sim_range *ranges, size_t count, const char *label);
/* The host waits for the stream (SIM_HOST: for all), uncounted: what reading a value of the framework implies. */
int sim_synchronize(void *stream);
/* The stream that work without a stream of its own belongs to, for code that asks; per thread, NULL at first. */
void sim_set_current_stream(void *stream);
void *sim_current_stream(void);
/* Runs up to n ready operations; returns how many ran. */
int sim_step(int n);

#ifdef __cplusplus
}
#endif

#endif
