// The happens-before check: the last write and the reads since, for every byte that anybody touched.
//
// Memory is cut into cells of equal history.  An access is unordered with an earlier one when its vector clock does not
// cover that one's epoch; two such accesses of which one writes are a race, whichever way they happened to run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "clock.hpp"

namespace sim {

enum class AccessKind : uint8_t { Read, Write, Free };

struct Actor {
    VectorClock clock; // everything that the access is ordered after, itself included
    Epoch epoch;
    std::string label;
};

class History {
public:
    struct Earlier {
        Epoch epoch;
        AccessKind kind = AccessKind::Read;
        uint32_t label = 0;
    };
    // A conflict found: bytes [low, high), the earlier access, and whether it is ordered before (then it is a use of
    // freed memory) or not.
    using Conflict = std::function<void(uint64_t low, uint64_t high, const Earlier &, bool ordered)>;

    void access(uint64_t low, uint64_t high, AccessKind kind, const Actor &actor, const Conflict &conflict);
    void forget(uint64_t low, uint64_t high); // the bytes are new, or nobody's business any more
    void clear();
    const std::string &label(uint32_t id) const { return labels_[id]; }
    size_t cells() const { return cells_.size(); }

private:
    struct Cell {
        uint64_t high = 0;
        bool written = false;
        Earlier write;
        std::vector<Earlier> reads; // one a clock
    };
    using Cells = std::map<uint64_t, Cell>; // by low

    void split(uint64_t at);
    void fill(uint64_t low, uint64_t high);
    uint32_t intern(const std::string &label);
    static bool check(const Cell &cell, uint64_t low, AccessKind kind, const Actor &actor, const Conflict &conflict);

    Cells cells_;
    std::vector<std::string> labels_;
    std::map<std::string, uint32_t> label_ids_;
};

} // namespace sim
