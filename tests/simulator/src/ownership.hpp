// Who touched which byte inside one kernel: threads of a launch are unordered unless a barrier orders them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace ptx {

// A segment is what one thread runs between two barriers.  Segment 0 is nobody.
class Order {
public:
    Order() : segments_(kFirst) {}

    uint32_t begin(uint32_t block, uint32_t thread, uint32_t epoch)
    {
        segments_.push_back({block, thread, epoch});
        return static_cast<uint32_t>(segments_.size() - 1);
    }

    // Whether everything in `before`, which ran first, must run first.
    bool ordered(uint32_t before, uint32_t after) const
    {
        if (before == kNobody || before == after)
            return true;
        if (before < kFirst || after < kFirst)
            return false;
        const Segment &b = segments_[before], &a = segments_[after];
        return b.block == a.block && (b.thread == a.thread || b.epoch < a.epoch);
    }

    // One segment that stands for two readers, ordered before a writer when both are.
    uint32_t merge(uint32_t earlier, uint32_t later)
    {
        if (ordered(earlier, later))
            return later;
        if (earlier == kSeveralBlocks || segments_[earlier].block != segments_[later].block)
            return kSeveralBlocks;
        const Segment &e = segments_[earlier];
        return e.thread == kSeveralThreads ? earlier : begin(e.block, kSeveralThreads, e.epoch);
    }

    static constexpr uint32_t kNobody = 0, kSeveralBlocks = 1, kAtomic = 2, kFirst = 3;
    static constexpr uint32_t kSeveralThreads = ~0u;

private:
    struct Segment {
        uint32_t block, thread, epoch;
    };
    std::vector<Segment> segments_;
};

// The last writer and the readers since, for every granule of one range of memory.
class Ownership {
public:
    Ownership(size_t bytes, unsigned granule)
        : granule_(granule), size_(bytes / granule + 1), reader_(allocate(size_)), writer_(allocate(size_))
    {
    }

    // Both return whether the access is unordered with an earlier one that it conflicts with.
    bool read(Order &order, size_t offset, unsigned bytes, uint32_t segment)
    {
        bool conflict = false;
        for (size_t g = offset / granule_, end = (offset + bytes + granule_ - 1) / granule_; g < end; g++) {
            uint32_t &reader = reader_[g];
            const uint32_t writer = writer_[g];
            conflict |= writer != Order::kAtomic && !order.ordered(writer, segment);
            if (reader != segment)
                reader = order.merge(reader, segment);
        }
        return conflict;
    }

    // Writing the value that is there already is no conflict: flags are set that way.
    bool write(Order &order, size_t offset, unsigned bytes, uint32_t segment, bool unchanged, bool atomic)
    {
        bool conflict = false;
        for (size_t g = offset / granule_, end = (offset + bytes + granule_ - 1) / granule_; g < end; g++) {
            uint32_t &writer = writer_[g], &reader = reader_[g];
            const bool both_atomic = atomic && writer == Order::kAtomic;
            conflict |= !unchanged && !both_atomic && !order.ordered(writer, segment);
            conflict |= !unchanged && !order.ordered(reader, segment);
            writer = atomic ? Order::kAtomic : segment;
        }
        return conflict;
    }

    unsigned granule() const { return granule_; }
    size_t size() const { return size_; }
    bool was_read(size_t g) const { return reader_[g] != Order::kNobody; }
    bool was_written(size_t g) const { return writer_[g] != Order::kNobody; }

private:
    struct Free {
        void operator()(uint32_t *p) const { std::free(p); }
    };
    using Array = std::unique_ptr<uint32_t[], Free>;
    // calloc, because it hands out untouched zero pages: a kernel may use little of a large range.
    static Array allocate(size_t n)
    {
        auto *p = static_cast<uint32_t *>(std::calloc(n, sizeof(uint32_t)));
        if (p == nullptr)
            throw std::bad_alloc();
        return Array(p);
    }

    unsigned granule_;
    size_t size_;
    Array reader_, writer_;
};

} // namespace ptx
