#include "history.hpp"

#include <algorithm>

namespace sim {

uint32_t History::intern(const std::string &label)
{
    const auto [found, added] = label_ids_.try_emplace(label, static_cast<uint32_t>(labels_.size()));
    if (added)
        labels_.push_back(label);
    return found->second;
}

// Makes `at` a boundary between cells, if it is inside one.
void History::split(uint64_t at)
{
    auto next = cells_.lower_bound(at);
    if (next == cells_.begin() || (next != cells_.end() && next->first == at))
        return;
    Cell &cell = std::prev(next)->second;
    if (cell.high <= at)
        return;
    Cell upper = cell;
    cell.high = at;
    cells_.emplace_hint(next, at, std::move(upper));
}

// Puts empty cells where there are none yet.
void History::fill(uint64_t low, uint64_t high)
{
    auto at = cells_.lower_bound(low);
    while (low < high) {
        const uint64_t next = at == cells_.end() ? high : std::min(high, at->first);
        if (low < next)
            cells_.emplace_hint(at, low, Cell{next, false, {}, {}});
        if (at == cells_.end())
            return;
        low = at->second.high;
        ++at;
    }
}

bool History::check(const Cell &cell, uint64_t low, AccessKind kind, const Actor &actor, const Conflict &conflict)
{
    bool clean = true;
    const auto test = [&](const Earlier &e) {
        const bool ordered = actor.clock.covers(e.epoch);
        if (ordered && e.kind != AccessKind::Free)
            return;
        clean = false;
        conflict(low, cell.high, e, ordered);
    };
    if (cell.written)
        test(cell.write);
    if (kind != AccessKind::Read)
        std::for_each(cell.reads.begin(), cell.reads.end(), test);
    return clean;
}

void History::access(uint64_t low, uint64_t high, AccessKind kind, const Actor &actor, const Conflict &conflict)
{
    if (low >= high)
        return;
    split(low);
    split(high);
    const Earlier now{actor.epoch, kind, intern(actor.label)};
    if (kind == AccessKind::Read) {
        fill(low, high);
        for (auto at = cells_.lower_bound(low); at != cells_.end() && at->first < high; ++at) {
            check(at->second, at->first, kind, actor, conflict);
            auto &reads = at->second.reads;
            const auto same = [&](const Earlier &e) { return e.epoch.clock == now.epoch.clock; };
            reads.erase(std::remove_if(reads.begin(), reads.end(), same), reads.end());
            reads.push_back(now);
        }
        return;
    }
    // A write orders everything after it, so one cell is enough from now on.
    auto at = cells_.lower_bound(low);
    while (at != cells_.end() && at->first < high) {
        check(at->second, at->first, kind, actor, conflict);
        at = cells_.erase(at);
    }
    cells_.emplace_hint(at, low, Cell{high, true, now, {}});
}

void History::forget(uint64_t low, uint64_t high)
{
    split(low);
    split(high);
    cells_.erase(cells_.lower_bound(low), cells_.lower_bound(high));
}

void History::clear()
{
    cells_.clear();
    labels_.clear();
    label_ids_.clear();
}

} // namespace sim
