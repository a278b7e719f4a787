// The simulator's one state, and the lock around it.  Everything here is called with the lock held unless it says so.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "history.hpp"
#include "memory.hpp"
#include "objects.hpp"
#include "report.hpp"
#include "simcuda.h"

namespace sim {

// A fault to inject.  `seen` counts calls since it was set.
struct Fault {
    std::string api;
    uint64_t nth, times, seen;
    CUresult code;
};

// Pinned memory that the device may not have read yet: the host must leave it alone.
struct Watch {
    const void *base;
    size_t bytes;
    uint64_t hash;
    Epoch epoch;
    std::string label;
};

struct Machine {
    int driver_version = 13000;
    std::set<std::string> hidden;
    std::vector<std::unique_ptr<Device>> devices;
};

struct Counts {
    std::map<std::string, uint64_t> calls;
    uint64_t total = 0, blocking = 0, gil_held = 0;
};

template <class T>
using Owned = std::map<const void *, std::unique_ptr<T>>; // handle -> object

struct State {
    std::mutex mutex;
    std::condition_variable changed; // an operation finished, or there is something new to run

    int schedule = SIM_EAGER;
    std::mt19937_64 random{1};
    bool initialised = false;
    int process = 0; // that called cuInit
    Machine machine;

    Owned<Stream> streams;
    Owned<Event> events;
    Owned<Module> modules;
    Owned<Graph> graphs;
    Owned<GraphExec> execs;
    std::map<uint32_t, Stream *> busy; // streams with queued work, by id
    uint32_t next_stream = 1;
    unsigned long long next_capture = 1;

    MemoryMap memory;
    History history;
    VectorClock host;
    std::vector<Watch> watches;

    Report report;
    Counts counts;
    std::vector<Fault> faults;
    uint64_t launches = 0, failing_launch = 0;
    CUresult failing_code = CUDA_SUCCESS;
    std::string delayed;
    int delay_us = 0;
    int (*gil_probe)() = nullptr;
};

// Leaked on purpose: handles and the background thread are used while the process exits.
State &state();

// Contexts that this thread pushed; the last one is current.
std::vector<Context *> &context_stack();
Context *current_context();

void configure_from_environment();
void set_devices(const std::string &capabilities);
Device *device_at(int ordinal); // NULL when there is none

void report(const std::string &kind, const std::string &text);

// One access by an operation or the host: bounds, lifetime and order are checked.
void touch(const void *base, size_t bytes, AccessKind kind, const Actor &actor);
void touch_range(const Range &range, uint64_t low, uint64_t high, AccessKind kind, const Actor &actor);

// The host learned that everything in `clock` is done.
void host_join(const VectorClock &clock);
Actor host_actor(const std::string &label);
void check_watches();
void watch(const void *base, size_t bytes, const Op &op);

// The object behind a handle, NULL when there is none or it is dead.
template <class T>
T *lookup(const Owned<T> &objects, const void *handle)
{
    const auto found = objects.find(handle);
    return found != objects.end() && !found->second->dead ? found->second.get() : nullptr;
}

template <class T>
T *adopt(Owned<T> &objects, std::unique_ptr<T> object)
{
    T *raw = object.get();
    objects[raw] = std::move(object);
    return raw;
}

template <class T>
int count_live(const Owned<T> &objects)
{
    int n = 0;
    for (const auto &[handle, object] : objects)
        n += !object->dead;
    return n;
}

} // namespace sim
