#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

namespace sim {
namespace {

constexpr uint64_t kAlignment = 512;      // of every allocation, as on a device
constexpr uint64_t kGap = 512;            // between allocations: a small overrun meets nobody else's memory
constexpr uint64_t kImplicit = 64 * 1024; // size and alignment of implicit ranges

constexpr uint8_t kFresh = 0xa5, kDead = 0xde;

std::string size_text(size_t bytes) { return " (" + std::to_string(bytes) + " bytes)"; }

} // namespace

Range *MemoryMap::allocate(Range::Kind kind, size_t bytes, int device)
{
    if (bytes > limit || used > limit - bytes)
        return nullptr;
    std::unique_ptr<uint8_t[]> storage(new (std::nothrow) uint8_t[bytes + kAlignment + kGap]);
    if (storage == nullptr)
        return nullptr;
    const uint64_t base = (reinterpret_cast<uint64_t>(storage.get()) + kAlignment - 1) / kAlignment * kAlignment;
    std::memset(reinterpret_cast<void *>(base), kFresh, bytes);
    const char *what = kind == Range::Pinned ? "pinned memory #" : "device memory #";
    Range *range = add(base, bytes, kind, device, what + std::to_string(++serial_) + size_text(bytes));
    range->storage = std::move(storage);
    used += bytes;
    return range;
}

void MemoryMap::release(Range &range)
{
    range.freed = true;
    used -= range.size;
    std::memset(reinterpret_cast<void *>(range.base), kDead, range.size);
}

// Whatever else was known about these addresses is replaced: its owner must have given them back.
Range *MemoryMap::add(uint64_t base, size_t bytes, Range::Kind kind, int device, const std::string &label)
{
    auto at = ranges_.lower_bound(base);
    if (at != ranges_.begin() && std::prev(at)->second.end() > base && !std::prev(at)->second.owned())
        at = retire(std::prev(at));
    while (at != ranges_.end() && at->first < base + bytes && !at->second.owned())
        at = retire(at);
    Range &range = ranges_[base];
    range.base = base;
    range.size = bytes;
    range.kind = kind;
    range.device = device;
    range.label = label;
    return &range;
}

void MemoryMap::remove(uint64_t base)
{
    const auto found = ranges_.find(base);
    if (found != ranges_.end() && !found->second.owned())
        retire(found);
}

MemoryMap::Ranges::iterator MemoryMap::retire(Ranges::iterator at)
{
    const auto next = std::next(at);
    retired_.push_back(ranges_.extract(at));
    return next;
}

Range *MemoryMap::find(uint64_t address)
{
    auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin())
        return nullptr;
    Range &range = std::prev(next)->second;
    return address < range.end() ? &range : nullptr;
}

Range *MemoryMap::find_or_add(uint64_t address)
{
    Range *range = find(address);
    if (range != nullptr || !host_is_device || address < 4096)
        return range;
    // Never over a neighbour that is known better.
    uint64_t low = address / kImplicit * kImplicit, high = low + kImplicit;
    const auto next = ranges_.upper_bound(address);
    if (next != ranges_.end())
        high = std::min(high, next->first);
    if (next != ranges_.begin())
        low = std::max(low, std::prev(next)->second.end());
    return add(low, high - low, Range::Implicit, kAnyDevice, "host memory");
}

Range *MemoryMap::live(uint64_t base)
{
    const auto found = ranges_.find(base);
    return found != ranges_.end() && !found->second.freed ? &found->second : nullptr;
}

void MemoryMap::purge()
{
    retired_.clear();
    for (auto at = ranges_.begin(); at != ranges_.end();)
        at = at->second.freed || at->second.kind == Range::Implicit ? ranges_.erase(at) : std::next(at);
}

void MemoryMap::clear()
{
    retired_.clear();
    ranges_.clear();
    used = 0;
    limit = kNoLimit;
    serial_ = 0;
    host_is_device = false;
}

int MemoryMap::count(Range::Kind kind) const
{
    return static_cast<int>(std::count_if(ranges_.begin(), ranges_.end(), [kind](const auto &entry) {
        return entry.second.kind == kind && !entry.second.freed;
    }));
}

} // namespace sim
