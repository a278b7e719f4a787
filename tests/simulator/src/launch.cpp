#include "launch.hpp"

#include <algorithm>
#include <cstring>

#include "scheduler.hpp"
#include "state.hpp"

namespace sim {
namespace {

std::string hex(uint64_t value)
{
    char text[20];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

// What one launch did to one range of memory.
struct Track {
    Track(Range *range_, unsigned granule)
        : range(range_), origin(range_->base / 64 * 64), owners(range_->end() - origin, granule)
    {
    }
    Range *range;
    uint64_t origin; // aligned, so that granules are
    ptx::Ownership owners;
    std::vector<bool> non_coherent; // granules read through the read-only cache; empty: none
};

// Checks every access of a running kernel.  The lock is not held while a kernel runs, so that hosts can go on; it is
// taken for whatever leaves this object.
class Monitor : public ptx::Memory {
public:
    Monitor(const ptx::Entry &entry, const Op &op)
        : entry_(entry), op_(op), device_(op.stream->context->device->ordinal), sites_(entry.code.size())
    {
    }

    void access(const ptx::Access &a) override
    {
        Track *&site = sites_[static_cast<size_t>(a.insn - entry_.code.data())];
        if (site == nullptr || !site->range->holds(a.address, a.size))
            site = &track(a);
        const size_t offset = a.address - site->origin;
        bool conflicting;
        if (a.write) {
            const bool unchanged =
                !a.atomic && std::memcmp(reinterpret_cast<void *>(a.address), a.incoming, a.size) == 0;
            conflicting = site->owners.write(order, offset, a.size, a.segment, unchanged, a.atomic);
        } else {
            conflicting = site->owners.read(order, offset, a.size, a.segment);
            if (a.non_coherent)
                note_non_coherent(*site, offset, a.size);
        }
        if (conflicting)
            conflict("threads race in " + site->range->label + ", " + (a.write ? "write" : "read") + " by " + place(a));
    }

    void conflict(const std::string &what) override
    {
        Lock lock(state().mutex);
        report("INTRA-KERNEL", what);
    }

    // With the lock held: the accesses become part of the device's history.
    void finish()
    {
        for (const auto &track : tracks_) {
            check_non_coherent(*track);
            book(*track, AccessKind::Read, &ptx::Ownership::was_read);
            book(*track, AccessKind::Write, &ptx::Ownership::was_written);
        }
    }

private:
    std::string place(const ptx::Access &a) const
    {
        return entry_.name + " '" + a.insn->name + "' at PTX line " + std::to_string(a.insn->line);
    }

    Track &track(const ptx::Access &a)
    {
        Lock lock(state().mutex);
        Range *range = state().memory.find_or_add(a.address);
        const auto illegal = [&](const std::string &why) {
            throw ptx::Fault(ptx::kIllegalAddress, hex(a.address) + ": " + why + ", " + place(a));
        };
        if (range == nullptr)
            illegal("no such memory");
        if (range->freed)
            illegal("freed " + range->label);
        if (!range->holds(a.address, a.size))
            illegal(std::to_string(a.address + a.size - range->end()) + " bytes past the end of " + range->label);
        if (range->device != kAnyDevice && range->device != device_)
            illegal(range->label + " belongs to another device");
        for (const auto &known : tracks_)
            if (known->range == range)
                return *known;
        tracks_.push_back(std::make_unique<Track>(range, entry_.granule));
        return *tracks_.back();
    }

    static void note_non_coherent(Track &track, size_t offset, unsigned size)
    {
        const unsigned granule = track.owners.granule();
        if (track.non_coherent.empty())
            track.non_coherent.resize(track.owners.size());
        for (size_t g = offset / granule; g < (offset + size) / granule; g++)
            track.non_coherent[g] = true;
    }

    void check_non_coherent(const Track &track) const
    {
        for (size_t g = 0; g < track.non_coherent.size(); g++) {
            if (track.non_coherent[g] && track.owners.was_written(g)) {
                report("INTRA-KERNEL", entry_.name + " reads by ld.global.nc what it writes in " + track.range->label);
                return;
            }
        }
    }

    void book(const Track &track, AccessKind kind, bool (ptx::Ownership::*touched)(size_t) const) const
    {
        const unsigned granule = track.owners.granule();
        const size_t end = track.owners.size();
        for (size_t g = 0; g < end; g++) {
            if (!(track.owners.*touched)(g))
                continue;
            const size_t first = g;
            while (g < end && (track.owners.*touched)(g))
                g++;
            const uint64_t low = std::max(track.origin + first * granule, track.range->base);
            const uint64_t high = std::min(track.origin + g * granule, track.range->end());
            touch_range(*track.range, low, high, kind, op_.actor);
            if (kind == AccessKind::Read && track.range->kind == Range::Pinned)
                watch(reinterpret_cast<const void *>(low), high - low, op_);
        }
    }

    const ptx::Entry &entry_;
    const Op &op_;
    int device_;
    std::vector<Track *> sites_; // by instruction: what it touched last, nearly always what it touches next
    std::vector<std::unique_ptr<Track>> tracks_;
};

struct LaunchData {
    Function *function;
    LaunchShape shape;
    std::vector<uint64_t> parameters; // as 64-bit words, for alignment
    uint64_t seed = 0;
    uint64_t number = 0;
};

void kernel_fault(Context &context, int code, const std::string &why)
{
    report("DEVICE-FAULT", why);
    if (context.sticky == CUDA_SUCCESS)
        context.sticky = static_cast<CUresult>(code);
}

void count_executed(ptx::Entry &entry, const std::vector<uint64_t> &counts)
{
    for (size_t i = 0; i < counts.size(); i++)
        if (counts[i])
            entry.executed[entry.code[i].name] += counts[i];
}

void run_kernel(const LaunchData &data, Op &op, Lock &lock)
{
    State &s = state();
    if (data.number == s.failing_launch)
        return kernel_fault(*op.stream->context, s.failing_code, "injected fault in " + op.actor.label);
    ptx::Entry &entry = *data.function->entry;
    Monitor monitor(entry, op);
    std::vector<uint64_t> counts;
    std::string why;
    int code = 0;
    lock.unlock();
    try {
        auto *storage = data.function->module->code->storage.data();
        ptx::run({entry, reinterpret_cast<const uint8_t *>(data.parameters.data()), storage, data.shape.grid,
                  data.shape.block, data.shape.shared, data.seed, monitor},
                 counts);
    } catch (const ptx::Fault &fault) {
        code = fault.code;
        why = fault.what();
    }
    lock.lock();
    count_executed(entry, counts);
    if (code)
        kernel_fault(*op.stream->context, code, op.actor.label + ": " + why);
    monitor.finish();
}

CUresult check_shape(const Function &function, const LaunchShape &shape)
{
    const ptx::Entry &entry = *function.entry;
    const ptx::Dim3 &g = shape.grid, &b = shape.block;
    const uint64_t threads = b.count();
    if (g.count() == 0 || threads == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || b.z > 64 || threads > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    if (entry.required_threads && threads != entry.required_threads)
        return CUDA_ERROR_INVALID_VALUE;
    if (threads > entry.max_threads)
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (entry.shared_bytes + shape.shared > static_cast<size_t>(function.max_dynamic_shared))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult copy_parameters(const ptx::Entry &entry, void **parameters, void **extra, uint8_t *into)
{
    if (parameters) {
        for (size_t i = 0; i < entry.params.size(); i++) {
            if (parameters[i] == nullptr)
                return CUDA_ERROR_INVALID_VALUE;
            std::memcpy(into + entry.params[i].offset, parameters[i], entry.params[i].size);
        }
        return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    }
    const void *buffer = nullptr;
    size_t size = 0;
    for (int i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[i + 1];
        else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *static_cast<const size_t *>(extra[i + 1]);
    }
    if (size < entry.param_bytes || (entry.param_bytes && buffer == nullptr))
        return CUDA_ERROR_INVALID_VALUE;
    if (buffer)
        std::memcpy(into, buffer, entry.param_bytes);
    return CUDA_SUCCESS;
}

} // namespace

CUresult launch(Function &function, const LaunchShape &shape, Stream &stream, void **parameters, void **extra,
                Lock &lock)
{
    State &s = state();
    if (function.module->dead) {
        report("MISUSE", "launch of " + function.entry->name + " after its module was unloaded");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (function.module->context != stream.context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult refused = check_shape(function, shape))
        return refused;
    auto data = std::make_shared<LaunchData>();
    data->function = &function;
    data->shape = shape;
    data->parameters.resize(function.entry->param_bytes / 8 + 1);
    auto *into = reinterpret_cast<uint8_t *>(data->parameters.data());
    if (const CUresult refused = copy_parameters(*function.entry, parameters, extra, into))
        return refused;
    // EAGER is the plain machine: ascending order.  Any other schedule shuffles.
    data->seed = s.schedule == SIM_EAGER ? 0 : s.random() | 1;
    data->number = ++s.launches;
    return submit(stream, {function.entry->name, nullptr, [data](Op &op, Lock &l) { run_kernel(*data, op, l); }}, lock);
}

} // namespace sim
