// The control surface: see simcuda.h.
#include "control.hpp"

#include <cstring>
#include <sstream>

#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

namespace {

Lock locked() { return Lock(state().mutex); }

// Text for the caller, alive until the calling thread asks again.
const char *keep(const std::string &text)
{
    static thread_local std::string kept;
    kept = text;
    return kept.c_str();
}

void set_schedule(int schedule, uint64_t seed)
{
    State &s = state();
    s.schedule = schedule;
    s.random.seed(seed);
    if (schedule == SIM_THREAD)
        start_background_thread();
    s.changed.notify_all();
}

// Lets everything finish, whatever the schedule was.
void finish_work(Lock &lock)
{
    State &s = state();
    s.delayed.clear();
    drain(lock);
    for (const auto &[handle, stream] : s.streams)
        s.host.join(stream->clock);
}

void clear_findings()
{
    State &s = state();
    s.report.clear();
    s.counts = Counts();
    s.faults.clear();
    s.failing_launch = 0;
    s.history.clear();
    s.watches.clear();
    s.gil_probe = nullptr;
    s.delay_us = 0;
    forked_calls() = 0;
    for (const auto &device : s.machine.devices)
        device->primary.sticky = CUDA_SUCCESS;
    for (const auto &[handle, module] : s.modules)
        for (auto &[name, entry] : module->code->entries)
            entry.executed.clear();
}

template <class T>
void bury(Owned<T> &objects)
{
    for (auto at = objects.begin(); at != objects.end();)
        at = at->second->dead ? objects.erase(at) : std::next(at);
}

int live_streams()
{
    int n = 0;
    for (const auto &[handle, stream] : state().streams)
        n += !stream->dead && !stream->legacy && !stream->internal;
    return n;
}

int live(const std::string &kind)
{
    State &s = state();
    int n = 0;
    if (kind == "contexts")
        for (const auto &device : s.machine.devices)
            n += device->primary.references;
    else if (kind == "pending")
        for (const auto &[id, stream] : s.busy)
            n += static_cast<int>(stream->queue.size());
    else if (kind == "streams")
        n = live_streams();
    else if (kind == "events")
        n = count_live(s.events);
    else if (kind == "modules")
        n = count_live(s.modules);
    else if (kind == "graphs")
        n = count_live(s.graphs);
    else if (kind == "execs")
        n = count_live(s.execs);
    else if (kind == "device")
        n = s.memory.count(Range::Device);
    else if (kind == "pinned")
        n = s.memory.count(Range::Pinned);
    else
        n = -1;
    return n;
}

// Calls f for every kernel of that name, however many modules have one.
template <class F>
void for_kernel(const std::string &name, F f)
{
    for (const auto &[handle, module] : state().modules)
        for (const auto &[entry_name, entry] : module->code->entries)
            if (name == "*" || name == entry_name)
                f(entry);
}

std::set<std::string> split(const char *list)
{
    std::set<std::string> parts;
    std::istringstream in(list ? list : "");
    for (std::string part; std::getline(in, part, ',');)
        parts.insert(part);
    return parts;
}

void touch_all(const sim_range *ranges, size_t count, const Actor &actor)
{
    for (int write = 0; write < 2; write++) // reads first: an in-place operation reads what it then writes
        for (size_t i = 0; i < count; i++)
            if ((ranges[i].write != 0) == (write != 0))
                touch(ranges[i].base, ranges[i].bytes, write ? AccessKind::Write : AccessKind::Read, actor);
}

// Control functions take streams of any context.
Stream *stream_of(void *handle) { return find_stream(static_cast<CUstream>(handle)); }

thread_local void *current_stream = nullptr;

} // namespace

extern "C" {

void sim_reset(int schedule, uint64_t seed)
{
    Lock lock = locked();
    finish_work(lock);
    State &s = state();
    for (const auto &device : s.machine.devices)
        device->primary.references = 0;
    s.streams.clear();
    s.events.clear();
    s.modules.clear();
    s.graphs.clear();
    s.execs.clear();
    s.memory.clear();
    s.host = VectorClock();
    s.next_stream = 1;
    s.next_capture = 1;
    s.launches = 0;
    s.initialised = false;
    configure_from_environment();
    clear_findings();
    context_stack().clear();
    current_stream = nullptr;
    set_schedule(schedule, seed);
}

void sim_begin(int schedule, uint64_t seed)
{
    Lock lock = locked();
    finish_work(lock);
    State &s = state();
    bury(s.streams);
    bury(s.events);
    bury(s.graphs);
    bury(s.execs);
    bury(s.modules);
    s.memory.purge();
    s.memory.limit = MemoryMap::kNoLimit;
    clear_findings();
    set_schedule(schedule, seed);
}

const char *sim_report(void)
{
    Lock lock = locked();
    check_watches();
    return keep(state().report.text());
}

int sim_report_count(const char *kind)
{
    Lock lock = locked();
    check_watches();
    return state().report.count(kind);
}

int sim_live(const char *kind)
{
    Lock lock = locked();
    return live(kind);
}

const char *sim_leaks(void)
{
    Lock lock = locked();
    std::string text;
    for (const char *kind :
         {"contexts", "streams", "events", "modules", "graphs", "execs", "device", "pinned", "pending"})
        if (const int n = live(kind))
            text += (text.empty() ? "" : " ") + std::string(kind) + "=" + std::to_string(n);
    return keep(text);
}

uint64_t sim_forked_calls(void) { return forked_calls(); }

uint64_t sim_calls(const char *api)
{
    Lock lock = locked();
    const Counts &counts = state().counts;
    if (std::strcmp(api, "*") == 0)
        return counts.total;
    const auto found = counts.calls.find(api);
    return found == counts.calls.end() ? 0 : found->second;
}

const char *sim_call_log(void)
{
    Lock lock = locked();
    std::string text;
    for (const auto &[api, n] : state().counts.calls)
        text += (text.empty() ? "" : " ") + api + "=" + std::to_string(n);
    return keep(text);
}

uint64_t sim_blocking_calls(void)
{
    Lock lock = locked();
    return state().counts.blocking;
}

uint64_t sim_gil_blocks(void)
{
    Lock lock = locked();
    return state().counts.gil_held;
}

void sim_set_gil_probe(int (*probe)(void))
{
    Lock lock = locked();
    state().gil_probe = probe;
}

uint64_t sim_executed(const char *kernel, const char *mnemonic)
{
    Lock lock = locked();
    const std::string prefix = std::strcmp(mnemonic, "*") == 0 ? "" : mnemonic;
    uint64_t total = 0;
    for_kernel(kernel, [&](const ptx::Entry &entry) {
        for (const auto &[name, n] : entry.executed)
            if (name.compare(0, prefix.size(), prefix) == 0)
                total += n;
    });
    return total;
}

const char *sim_executed_log(const char *kernel)
{
    Lock lock = locked();
    std::map<std::string, uint64_t> all;
    for_kernel(kernel, [&](const ptx::Entry &entry) {
        for (const auto &[name, n] : entry.executed)
            all[name] += n;
    });
    std::string text;
    for (const auto &[name, n] : all)
        text += (text.empty() ? "" : " ") + name + "=" + std::to_string(n);
    return keep(text);
}

void sim_fault(const char *api, uint64_t nth, int code, uint64_t times)
{
    Lock lock = locked();
    state().faults.push_back({api, nth, times, 0, static_cast<CUresult>(code)});
}

void sim_fault_kernel(uint64_t nth, int code)
{
    Lock lock = locked();
    state().failing_launch = state().launches + nth;
    state().failing_code = static_cast<CUresult>(code);
}

void sim_set_memory_limit(size_t bytes)
{
    Lock lock = locked();
    state().memory.limit = bytes;
}

void sim_delay(const char *label_part, int microseconds)
{
    Lock lock = locked();
    state().delayed = label_part;
    state().delay_us = microseconds;
}

void sim_set_devices(const char *capabilities)
{
    Lock lock = locked();
    set_devices(capabilities);
}

void sim_set_driver_version(int version)
{
    Lock lock = locked();
    state().machine.driver_version = version;
}

void sim_hide(const char *functions)
{
    Lock lock = locked();
    state().machine.hidden = split(functions);
}

void sim_set_host_memory(int is_device_memory)
{
    Lock lock = locked();
    state().memory.host_is_device = is_device_memory != 0;
}

void sim_register(void *base, size_t bytes, const char *label, int device)
{
    Lock lock = locked();
    const auto low = reinterpret_cast<uint64_t>(base);
    state().history.forget(low, low + bytes);
    state().memory.add(low, bytes, Range::External, device, label);
}

void sim_unregister(void *base)
{
    Lock lock = locked();
    const auto low = reinterpret_cast<uint64_t>(base);
    if (const Range *range = state().memory.live(low))
        state().history.forget(range->base, range->end());
    state().memory.remove(low);
}

void sim_name_stream(void *stream, const char *name)
{
    Lock lock = locked();
    if (Stream *s = stream_of(stream))
        s->name = name;
}

int sim_work(void *stream, const sim_range *ranges, size_t count, void *into, const void *data, size_t bytes,
             const char *label)
{
    Lock lock = locked();
    Stream *s = stream_of(stream);
    if (s == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    const std::vector<sim_range> touched(ranges, ranges + count);
    std::vector<uint8_t> copy;
    if (data)
        copy.assign(static_cast<const uint8_t *>(data), static_cast<const uint8_t *>(data) + bytes);
    const auto run = [touched, copy, into](Op &op, Lock &) {
        touch_all(touched.data(), touched.size(), op.actor);
        if (!copy.empty())
            std::memcpy(into, copy.data(), copy.size());
    };
    return submit(*s, {label, nullptr, run}, lock);
}

int sim_enter(void *stream)
{
    Lock lock = locked();
    Stream *s = stream_of(stream);
    if (s == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    force(enqueue(*s, {"enter", nullptr, nullptr}), lock);
    return CUDA_SUCCESS;
}

int sim_access(void *stream, const sim_range *ranges, size_t count, const char *label)
{
    Lock lock = locked();
    if (stream == SIM_HOST) {
        touch_all(ranges, count, host_actor(label));
        return CUDA_SUCCESS;
    }
    Stream *s = stream_of(stream);
    if (s == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    const OpPtr op = enqueue(*s, {label, nullptr, nullptr});
    force(op, lock);
    touch_all(ranges, count, op->actor);
    return CUDA_SUCCESS;
}

int sim_synchronize(void *stream)
{
    Lock lock = locked();
    if (stream == SIM_HOST) {
        drain(lock);
        for (const auto &[handle, each] : state().streams)
            host_join(each->clock);
        return CUDA_SUCCESS;
    }
    Stream *s = stream_of(stream);
    if (s == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    host_waits_for(s->tail, lock);
    return CUDA_SUCCESS;
}

void sim_set_current_stream(void *stream) { current_stream = stream; }
void *sim_current_stream(void) { return current_stream; }

int sim_step(int n)
{
    Lock lock = locked();
    return step(n, lock);
}

} // extern "C"
