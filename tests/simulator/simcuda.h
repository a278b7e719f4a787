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
uint64_t sim_queue_full(void);              /* launches that waited for room in the device's queue */
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
void sim_set_queue_depth(size_t launches);      /* of one stream; 1024 unless set */
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
/* Runs everything that is queued.  The host learns nothing from it: what was unordered stays so. */
void sim_drain(void);
/* An event recorded on a stream, uncounted; it lives until the next reset or begin.  0: no such stream. */
uint64_t sim_record(void *stream);
/* The stream waits for it; a CUresult. */
int sim_wait(void *stream, uint64_t record);
int sim_is_capturing(void *stream);
/* What the framework does with a stream that the host waits for: refused while it is captured, which spoils that. */
int sim_refuse_capturing(void *stream);
/* Whether device memory begins or goes on at the address: of the driver, registered, or of the caching allocator. */
int sim_is_device_memory(const void *address);
/* A finding of the framework's side. */
void sim_finding(const char *kind, const char *text);

/* --- the framework's caching allocator, by the rules of PyTorch's for CUDA ------------------------------------- */
/* Memory of the calling thread's current stream, NULL without one.  A block that was freed is used again at once. */
void *sim_cache_allocate(size_t bytes);
/* Gives a block to the stream that it was allocated on, or once recorded streams are done; 0: no memory of the cache. */
int sim_cache_free(void *base);
int sim_cache_record_stream(void *base, void *stream); /* 0: no live memory of the cache */
void sim_cache_abandon(void);                          /* live blocks become host memory; free ones go */
const char *sim_cache_counts(void);                    /* "live=2 free=1 waiting=0": waiting for recorded streams */

#ifdef __cplusplus
}
#endif

#endif
