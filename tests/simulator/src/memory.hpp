// Device memory, which is host memory: allocations, ranges that a test registers, and what may be touched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr int kAnyDevice = -1;

struct Range {
    enum Kind : uint8_t {
        Device,   // cuMemAlloc and cuMemAllocAsync
        Pinned,   // cuMemHostAlloc
        External, // registered by a test: memory of the framework
        Implicit, // host memory that nobody registered, while host memory counts as device memory
        Module,   // variables of a loaded module
    };
    uint64_t base = 0, size = 0;
    Kind kind = External;
    int device = kAnyDevice;
    bool freed = false;
    bool free_queued = false; // cuMemFreeAsync was called; the memory goes when the stream gets there
    std::string label;
    std::unique_ptr<uint8_t[]> storage; // NULL for memory that somebody else owns

    uint64_t end() const { return base + size; }
    bool owned() const { return kind == Device || kind == Pinned; }
    bool holds(uint64_t address, uint64_t bytes) const
    {
        return address >= base && bytes <= size && address - base <= size - bytes;
    }
};

// Freed memory stays known, filled with a pattern, until purge(): a late access is then an error with a name.
class MemoryMap {
public:
    Range *allocate(Range::Kind kind, size_t bytes, int device); // NULL beyond the limit
    void release(Range &range);
    Range *add(uint64_t base, size_t bytes, Range::Kind kind, int device, const std::string &label);
    void remove(uint64_t base);
    Range *find(uint64_t address);        // the range that holds the address, freed or not; NULL: unknown
    Range *find_or_add(uint64_t address); // the same, making unknown memory an implicit range
    Range *live(uint64_t base);           // a range that starts there and is not freed
    void purge();                         // forgets freed and implicit memory; nothing may be running
    void clear();
    int count(Range::Kind kind) const; // live ones

    bool host_is_device = false;
    size_t limit = kNoLimit, used = 0;
    static constexpr size_t kNoLimit = size_t{1} << 40;

private:
    using Ranges = std::map<uint64_t, Range>; // by base
    Ranges::iterator retire(Ranges::iterator at);

    Ranges ranges_;
    std::vector<Ranges::node_type> retired_; // a running kernel may still point at them
    unsigned serial_ = 0;
};

} // namespace sim
