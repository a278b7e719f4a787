/* The worker thread and its queue; see host/stream.h.
 *
 * Locks, in the order in which they may be taken: the device's (host/backend.c), then the stream's.  Only fork takes
 * both.  Neither is held while rows run, while the probe runs, or while anything of the caller's is called.
 *
 * The end of the process: the worker is detached and simply disappears with it.  Joining it would make exit wait for
 * work that nobody will read, or for ever for a worker that a test holds.  The worker touches the device, which is
 * static, the queue, which nobody else frees, and the memory of rows, which must outlive their event anyway.
 */
#include "host/stream.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* Traffic of one piece: some 50 us of work, so that a waiter's last look at another thread's piece is short and taking
 * one (a lock, some 50 ns) costs nothing. */
#define PIECE_BYTES ((int64_t)512 << 10)

/* How often a waiter looks before it sleeps: about 10 us on current x86 processors, some of a piece, a fraction of what
 * falling asleep and waking up take. */
#define SPINS 200

/* Casts need next to nothing; a test's probe may run an interpreter on it. */
#define WORKER_STACK ((size_t)1 << 20)

typedef struct mp_host_job {
    struct mp_host_job *next;
    uint64_t number;
    mp_host_run run;     /* its rows: those below, or the caller's for a run at once */
    mp_host_place taken; /* everything before this place is complete or in some thread's hands */
    unsigned active;     /* threads that run a piece */
    int all_taken;
    int probed;
    int on_heap; /* else on the stack of the thread that runs it at once */
    mp_row rows[];
} mp_host_job;

static void
relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int
complete_locked(mp_host_stream *stream, uint64_t number)
{
    return atomic_load_explicit(&stream->complete, memory_order_relaxed) >= number;
}

/* Whether the head waits for the probe, which only the worker calls. */
static int
probe_due_locked(const mp_host_stream *stream)
{
    return stream->probe != NULL && !stream->head->probed;
}

/* Whether the calling thread may take a piece. */
static int
piece_left_locked(const mp_host_stream *stream)
{
    return stream->head != NULL && !stream->head->all_taken && stream->frozen == 0 && !stream->held &&
           !probe_due_locked(stream);
}

static int
worker_has_work_locked(const mp_host_stream *stream)
{
    return stream->head != NULL && !stream->head->all_taken && stream->frozen == 0;
}

/* Whether the calling thread has to signal `work`, best after it has let go of the lock that the worker wakes up to.  A
 * signal is a system call of some microseconds: only a worker that sleeps gets one, and only once. */
static int
must_wake_locked(mp_host_stream *stream)
{
    if (!stream->idle || !worker_has_work_locked(stream)) {
        return 0;
    }
    stream->idle = 0;
    return 1;
}

static void
wake_worker_locked(mp_host_stream *stream)
{
    if (must_wake_locked(stream)) {
        pthread_cond_signal(&stream->work);
    }
}

static void
append_locked(mp_host_stream *stream, mp_host_job *job)
{
    job->number = atomic_load_explicit(&stream->submitted, memory_order_relaxed) + 1;
    if (stream->head == NULL) {
        stream->head = job;
    } else {
        stream->tail->next = job;
    }
    stream->tail = job;
    atomic_store_explicit(&stream->submitted, job->number, memory_order_release);
}

/* Takes note that the calling thread is done with its piece of the head, which may have been the last. */
static void
piece_done_locked(mp_host_stream *stream)
{
    mp_host_job *job = stream->head;
    job->active--;
    int complete = job->all_taken && job->active == 0;
    if (complete) {
        stream->head = job->next;
        atomic_store_explicit(&stream->complete, job->number, memory_order_release);
        if (job->on_heap) {
            free(job);
        }
        wake_worker_locked(stream);
    }
    if (stream->waiting > 0 && (complete || stream->frozen > 0)) {
        pthread_cond_broadcast(&stream->done);
    }
}

/* Runs one piece of the head.  Lets go of the lock meanwhile. */
static void
run_piece_locked(mp_host_stream *stream)
{
    mp_host_job *job = stream->head; /* stays: it cannot complete while it is active */
    mp_host_place from = job->taken;
    job->all_taken = mp_host_run_advance(&job->run, &job->taken, PIECE_BYTES);
    job->active++;
    mp_host_place to = job->taken;
    pthread_mutex_unlock(&stream->lock);
    mp_host_run_between(&job->run, from, to);
    pthread_mutex_lock(&stream->lock);
    piece_done_locked(stream);
}

static void
sleep_locked(mp_host_stream *stream)
{
    stream->waiting++;
    pthread_cond_wait(&stream->done, &stream->lock);
    stream->waiting--;
}

/* While `held`, nobody takes from the head, even if the probe is removed: it cannot go away under the worker. */
static void
call_probe_locked(mp_host_stream *stream)
{
    mp_host_job *job = stream->head;
    void (*probe)(void *arg) = stream->probe;
    void *arg = stream->probe_arg;
    stream->held = 1;
    pthread_mutex_unlock(&stream->lock);
    probe(arg);
    pthread_mutex_lock(&stream->lock);
    stream->held = 0;
    job->probed = 1;
}

static void *
worker_main(void *arg)
{
    mp_host_stream *stream = arg;
    pthread_setname_np(pthread_self(), "ddp_mp host");
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        if (!worker_has_work_locked(stream)) {
            stream->idle = 1;
            pthread_cond_wait(&stream->work, &stream->lock);
            stream->idle = 0;
        } else if (probe_due_locked(stream)) {
            call_probe_locked(stream);
        } else {
            run_piece_locked(stream);
        }
    }
    return NULL;
}

/* Signals sent to the process are for the application's threads; those that report a fault of the thread itself stay
 * open, or a crash would leave no trace. */
static void
worker_signals(sigset_t *blocked)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigfillset(blocked);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        sigdelset(blocked, faults[i]);
    }
}

/* Starts the worker if there is none.  Returns 0 or an errno. */
static int
start_worker_locked(mp_host_stream *stream)
{
    if (stream->worker) {
        return 0;
    }
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code != 0) {
        return code;
    }
    pthread_t thread;
    sigset_t blocked, before;
    worker_signals(&blocked);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    pthread_sigmask(SIG_SETMASK, &blocked, &before); /* a new thread inherits the mask */
    code = pthread_create(&thread, &attributes, worker_main, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    stream->worker = code == 0;
    return code;
}

/* Runs everything on the calling thread if nothing is pending; returns whether it did.  The job is in the queue while
 * it runs, with nothing left to take: other runs and other threads' events come after it. */
static int
run_at_once(mp_host_stream *stream, const mp_host_run *run)
{
    mp_host_job job = {.run = *run, .all_taken = 1, .active = 1};
    pthread_mutex_lock(&stream->lock);
    int free_to_run = stream->head == NULL && stream->frozen == 0;
    if (free_to_run) {
        append_locked(stream, &job);
        pthread_mutex_unlock(&stream->lock);
        mp_host_run_all(run);
        pthread_mutex_lock(&stream->lock);
        piece_done_locked(stream);
    }
    pthread_mutex_unlock(&stream->lock);
    return free_to_run;
}

static mp_status
enqueue(mp_host_stream *stream, const mp_host_run *run, mp_error *err)
{
    const size_t bytes = run->count * sizeof(*run->rows);
    mp_host_job *job = malloc(sizeof(*job) + bytes);
    if (job == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "host launch: no memory for a run of %zu rows", run->count);
    }
    *job = (mp_host_job){.run = *run, .on_heap = 1};
    if (bytes > 0) {
        memcpy(job->rows, run->rows, bytes);
    }
    job->run.rows = job->rows;
    pthread_mutex_lock(&stream->lock);
    int code = start_worker_locked(stream);
    int wake = 0;
    if (code == 0) {
        append_locked(stream, job);
        wake = must_wake_locked(stream);
    }
    pthread_mutex_unlock(&stream->lock);
    if (wake) {
        pthread_cond_signal(&stream->work);
    }
    if (code != 0) {
        free(job);
        return mp_error_set(err, MP_ERR_DEVICE, "host launch: the worker thread cannot be started: %s (%d)",
                            strerror(code), code);
    }
    return MP_OK;
}

mp_status
mp_host_stream_submit(mp_host_stream *stream, const mp_host_run *run, int at_once, mp_error *err)
{
    return at_once && run_at_once(stream, run) ? MP_OK : enqueue(stream, run, err);
}

static void
spin(mp_host_stream *stream, uint64_t number)
{
    for (int i = 0; i < SPINS && !mp_host_stream_done(stream, number); i++) {
        relax();
    }
}

void
mp_host_stream_wait(mp_host_stream *stream, uint64_t number)
{
    if (mp_host_stream_done(stream, number)) {
        return;
    }
    int spun = 0;
    pthread_mutex_lock(&stream->lock);
    if (stream->head != NULL && !complete_locked(stream, number)) {
        (void)start_worker_locked(stream); /* missing only in a forked child; without one this thread does it all */
    }
    while (!complete_locked(stream, number)) {
        if (piece_left_locked(stream)) { /* the head comes before or is what we wait for: it is the oldest */
            run_piece_locked(stream);
            spun = 0;
        } else if (!spun) {
            pthread_mutex_unlock(&stream->lock);
            spin(stream, number);
            pthread_mutex_lock(&stream->lock);
            spun = 1;
        } else {
            sleep_locked(stream);
        }
    }
    pthread_mutex_unlock(&stream->lock);
}

void
mp_host_stream_kick(mp_host_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    if (stream->head != NULL) {
        (void)start_worker_locked(stream);
    }
    pthread_mutex_unlock(&stream->lock);
}

void
mp_host_stream_set_probe(mp_host_stream *stream, void (*probe)(void *arg), void *arg)
{
    pthread_mutex_lock(&stream->lock);
    stream->probe = probe;
    stream->probe_arg = arg;
    pthread_mutex_unlock(&stream->lock);
}

/* With no thread inside a piece, the queue tells exactly what has been written and what has not, in the child's memory
 * as in the parent's.  Both go on from there. */
void
mp_host_stream_before_fork(mp_host_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->frozen++;
    while (stream->head != NULL && stream->head->active > 0) {
        sleep_locked(stream);
    }
}

void
mp_host_stream_after_fork_parent(mp_host_stream *stream)
{
    stream->frozen--;
    wake_worker_locked(stream);
    pthread_cond_broadcast(&stream->done); /* who found no piece to take; there may be no worker that does */
    pthread_mutex_unlock(&stream->lock);
}

/* Only the thread that forked exists here.  The condition variables still count threads of the parent as waiting. */
void
mp_host_stream_after_fork_child(mp_host_stream *stream)
{
    pthread_cond_init(&stream->work, NULL);
    pthread_cond_init(&stream->done, NULL);
    stream->waiting = stream->frozen = 0;
    stream->worker = stream->idle = stream->held = 0;
    stream->probe = NULL; /* what a test holds it with belongs to the parent's threads */
    pthread_mutex_unlock(&stream->lock);
}
