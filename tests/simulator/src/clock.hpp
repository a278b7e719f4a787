// Vector clocks: what happened before what.  Clock 0 is the host, every stream has one of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sim {

// A point on one clock.
struct Epoch {
    uint32_t clock = 0;
    uint64_t time = 0;
};

class VectorClock {
public:
    uint64_t at(uint32_t clock) const { return clock < times_.size() ? times_[clock] : 0; }
    bool covers(const Epoch &e) const { return at(e.clock) >= e.time; }

    Epoch tick(uint32_t clock)
    {
        if (times_.size() <= clock)
            times_.resize(clock + 1);
        return {clock, ++times_[clock]};
    }

    void join(const VectorClock &other)
    {
        if (times_.size() < other.times_.size())
            times_.resize(other.times_.size());
        for (size_t i = 0; i < other.times_.size(); i++)
            times_[i] = std::max(times_[i], other.times_[i]);
    }

private:
    std::vector<uint64_t> times_;
};

constexpr uint32_t kHostClock = 0;

} // namespace sim
