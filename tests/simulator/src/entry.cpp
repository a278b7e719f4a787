#include "entry.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "control.hpp"
#include "scheduler.hpp"
#include "state.hpp"

namespace sim {
namespace {

CUresult injected(const std::string &api)
{
    CUresult code = CUDA_SUCCESS;
    for (Fault &f : state().faults) {
        if (f.api != "*" && f.api != api)
            continue;
        f.seen++;
        if (f.seen >= f.nth && f.seen - f.nth < f.times)
            code = f.code;
    }
    return code;
}

CUresult admit(const char *api, unsigned needs)
{
    State &s = state();
    s.counts.calls[api]++;
    s.counts.total++;
    if (const CUresult code = injected(api))
        return code;
    if (s.initialised && s.process != getpid()) {
        forked_calls()++;
        report("MISUSE", std::string(api) + " in a forked child of the process that called cuInit");
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if ((needs & kInit) && !s.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!(needs & kContext))
        return CUDA_SUCCESS;
    const Context *context = current_context();
    if (context == nullptr)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->references == 0) {
        report("MISUSE", std::string(api) + " after the primary context was released");
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return needs & kHealthy ? context->sticky : CUDA_SUCCESS;
}

void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }
void after_fork_in_child()
{
    child_after_fork();
    state().mutex.unlock();
}

// A fork while the background thread holds the lock would leave the child with a lock that nobody gives back.
__attribute__((constructor)) void load()
{
    configure_from_environment();
    forked_calls();
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

} // namespace

std::atomic<uint64_t> &forked_calls()
{
    static auto *shared = static_cast<std::atomic<uint64_t> *>(
        mmap(nullptr, sizeof(std::atomic<uint64_t>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    return *shared;
}

Call::Call(const char *api, unsigned needs) : lock(state().mutex), status(admit(api, needs)) {}

void note_blocking()
{
    State &s = state();
    s.counts.blocking++;
    if (s.gil_probe && s.gil_probe())
        s.counts.gil_held++;
}

} // namespace sim
