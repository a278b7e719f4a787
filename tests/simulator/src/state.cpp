#include "state.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace sim {

State &state()
{
    static State &one = *new State;
    return one;
}

std::vector<Context *> &context_stack()
{
    static thread_local std::vector<Context *> stack;
    return stack;
}

Context *current_context()
{
    const auto &stack = context_stack();
    return stack.empty() ? nullptr : stack.back();
}

Device *device_at(int ordinal)
{
    const auto &devices = state().machine.devices;
    return ordinal >= 0 && static_cast<size_t>(ordinal) < devices.size() ? devices[static_cast<size_t>(ordinal)].get()
                                                                         : nullptr;
}

static std::set<std::string> split_list(const std::string &list)
{
    std::set<std::string> parts;
    std::istringstream in(list);
    for (std::string part; std::getline(in, part, ',');)
        if (!part.empty())
            parts.insert(part);
    return parts;
}

// Devices are never destroyed: a thread may still have a context of one on its stack.
void set_devices(const std::string &capabilities)
{
    static auto &retired = *new std::vector<std::unique_ptr<Device>>;
    auto &devices = state().machine.devices;
    for (auto &device : devices) {
        device->primary.references = 0;
        retired.push_back(std::move(device));
    }
    devices.clear();
    std::istringstream in(capabilities);
    for (std::string part; std::getline(in, part, ',');) {
        auto device = std::make_unique<Device>();
        device->ordinal = static_cast<int>(devices.size());
        device->capability = std::atoi(part.c_str());
        device->primary.device = device.get();
        devices.push_back(std::move(device));
    }
}

void configure_from_environment()
{
    const auto get = [](const char *name, const char *otherwise) {
        const char *value = std::getenv(name);
        return std::string(value ? value : otherwise);
    };
    State &s = state();
    set_devices(get("SIMCUDA_DEVICES", "90"));
    s.machine.driver_version = std::atoi(get("SIMCUDA_DRIVER_VERSION", "13000").c_str());
    s.machine.hidden = split_list(get("SIMCUDA_HIDE", ""));
    s.memory.host_is_device = get("SIMCUDA_HOST_MEMORY", "0") != "0";
}

void report(const std::string &kind, const std::string &text) { state().report.add(kind, text); }

// ---------------------------------------------------------------------------------------------- accesses

static const char *verb(AccessKind kind)
{
    return kind == AccessKind::Read ? "read" : kind == AccessKind::Write ? "write" : "free";
}

// A booked write changes the bytes for a reason that the history judges; it is not the host going behind our back.
static void drop_watches(uint64_t low, uint64_t high)
{
    auto &watches = state().watches;
    const auto overlaps = [low, high](const Watch &w) {
        const auto base = reinterpret_cast<uint64_t>(w.base);
        return base < high && low < base + w.bytes;
    };
    watches.erase(std::remove_if(watches.begin(), watches.end(), overlaps), watches.end());
}

void touch_range(const Range &range, uint64_t low, uint64_t high, AccessKind kind, const Actor &actor)
{
    State &s = state();
    if (kind != AccessKind::Read && range.kind == Range::Pinned)
        drop_watches(low, high);
    s.history.access(low, high, kind, actor, [&](uint64_t from, uint64_t to, const History::Earlier &e, bool ordered) {
        const uint64_t begin = std::max(from, low) - range.base, end = std::min(to, high) - range.base;
        const std::string bytes =
            " bytes [" + std::to_string(begin) + ", " + std::to_string(end) + ") of " + range.label;
        const std::string &earlier = s.history.label(e.label);
        if (ordered)
            report("USE-AFTER-FREE", actor.label + " would " + verb(kind) + bytes + ", freed by " + earlier);
        else
            report("RACE", std::string(verb(e.kind)) + " by <" + earlier + "> and " + verb(kind) + " by <" +
                               actor.label + "> are unordered:" + bytes);
    });
}

void touch(const void *base, size_t bytes, AccessKind kind, const Actor &actor)
{
    uint64_t low = reinterpret_cast<uint64_t>(base);
    const uint64_t high = low + bytes;
    while (low < high) {
        const Range *range = state().memory.find_or_add(low);
        if (range == nullptr) // host memory that is no business of the device
            return;
        if (high > range->end() && range->kind != Range::Implicit && !state().memory.find_or_add(range->end())) {
            report("OUT-OF-BOUNDS",
                   actor.label + " runs " + std::to_string(high - range->end()) + " bytes past " + range->label);
            touch_range(*range, low, range->end(), kind, actor);
            return;
        }
        const uint64_t stop = std::min(high, range->end());
        touch_range(*range, low, stop, kind, actor);
        low = stop;
    }
}

// ---------------------------------------------------------------------------------------------- the host

static uint64_t fingerprint(const void *base, size_t bytes)
{
    uint64_t h = 1469598103934665603ull;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ static_cast<const uint8_t *>(base)[i]) * 1099511628211ull;
    return h;
}

void watch(const void *base, size_t bytes, const Op &op)
{
    state().watches.push_back({base, bytes, fingerprint(base, bytes), op.actor.epoch, op.actor.label});
}

// Called before the host learns anything new, so that a change made too early is seen in every schedule, also in one
// that had already run the copy.
void check_watches()
{
    State &s = state();
    std::vector<Watch> left;
    for (Watch &w : s.watches) {
        const Range *range = s.memory.find(reinterpret_cast<uint64_t>(w.base));
        if (range == nullptr || range->freed || s.host.covers(w.epoch))
            continue;
        if (fingerprint(w.base, w.bytes) == w.hash)
            left.push_back(std::move(w));
        else
            report("STAGING-OVERWRITE",
                   "the host changed " + range->label + " before it knew that <" + w.label + "> had read it");
    }
    s.watches = std::move(left);
}

void host_join(const VectorClock &clock)
{
    State &s = state();
    check_watches();
    s.host.join(clock);
    s.host.tick(kHostClock);
}

Actor host_actor(const std::string &label)
{
    State &s = state();
    const Epoch epoch = s.host.tick(kHostClock);
    return {s.host, epoch, label};
}

} // namespace sim
