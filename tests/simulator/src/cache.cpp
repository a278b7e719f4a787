#include "cache.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <vector>

#include "scheduler.hpp"
#include "state.hpp"

namespace sim {
namespace {

constexpr size_t kRound = 512; // as PyTorch rounds
constexpr uint8_t kFresh = 0xa5;

struct Block {
    std::unique_ptr<uint8_t[]> storage;
    uint64_t base = 0;
    size_t size = 0;
    Stream *stream = nullptr; // NULL: abandoned
    bool live = false;
    bool captured = false; // allocated during a capture: a graph's own, never to be used by others
    std::set<Stream *> users;  // of record_stream
    std::vector<OpPtr> events; // of those, once it is freed: it is nobody's before they are done
};

// Leaked on purpose, as the state is: tensors are freed while the process exits.
struct Cache {
    std::map<uint64_t, std::unique_ptr<Block>> blocks; // by base
    unsigned serial = 0;
};

Cache &cache()
{
    static Cache &one = *new Cache;
    return one;
}

// Books an access of the allocator's, in the order of the stream.  What that stream was ordered after runs first, so
// that whatever comes later and is not ordered is seen as such.  The access comes after `known` too, which the stream
// does not.
void book(Block &block, Stream &stream, size_t bytes, AccessKind kind, const char *label, Lock &lock,
          const VectorClock &known = VectorClock())
{
    const Range *range = state().memory.find(block.base);
    if (range == nullptr || stream.capture || block.captured)
        return;
    const OpPtr op = enqueue(stream, {label, nullptr, nullptr});
    force(op, lock);
    Actor actor = op->actor;
    actor.clock.join(known);
    touch_range(*range, block.base, std::min(block.base + bytes, range->end()), kind, actor);
}

// What record_stream held back comes free when its events are done; PyTorch, too, asks at an allocation.  That they are
// is luck, which orders nothing but the use of this memory.
void collect(Lock &lock)
{
    std::vector<Block *> done; // first: a booking may let go of the lock
    for (const auto &[base, block] : cache().blocks) {
        const auto &events = block->events;
        if (!events.empty() && std::all_of(events.begin(), events.end(), [](const OpPtr &op) { return op->done; }))
            done.push_back(block.get());
    }
    for (Block *block : done) {
        VectorClock known;
        for (const OpPtr &op : block->events)
            known.join(op->actor.clock);
        block->events.clear();
        book(*block, *block->stream, block->size, AccessKind::Free, "free", lock, known);
    }
}

// The smallest free block of the stream; of several, the one at the lowest address, so that a schedule replays.
Block *reuse(size_t bytes, const Stream &stream)
{
    Block *best = nullptr;
    for (const auto &[base, block] : cache().blocks)
        if (!block->live && block->events.empty() && block->stream == &stream && block->size >= bytes &&
            block->captured == (stream.capture != nullptr) &&
            (best == nullptr || block->size < best->size))
            best = block.get();
    return best;
}

Block *reserve(size_t bytes, Stream &stream)
{
    auto block = std::make_unique<Block>();
    block->storage.reset(new (std::nothrow) uint8_t[bytes + 2 * kRound]); // to align it, and a gap
    if (block->storage == nullptr)
        return nullptr;
    block->base = (reinterpret_cast<uint64_t>(block->storage.get()) + kRound - 1) / kRound * kRound;
    block->size = bytes;
    block->stream = &stream;
    block->captured = stream.capture != nullptr;
    std::memset(reinterpret_cast<void *>(block->base), kFresh, bytes);
    Block *raw = block.get();
    cache().blocks[raw->base] = std::move(block);
    return raw;
}

Block *find(uint64_t base)
{
    const auto found = cache().blocks.find(base);
    return found == cache().blocks.end() ? nullptr : found->second.get();
}

} // namespace

void *cache_allocate(size_t bytes, Stream &stream, Lock &lock)
{
    const size_t rounded = std::max<size_t>(1, (bytes + kRound - 1) / kRound) * kRound;
    collect(lock);
    Block *block = reuse(rounded, stream);
    if (block == nullptr)
        block = reserve(rounded, stream);
    if (block == nullptr)
        return nullptr;
    block->live = true;
    const std::string label = "tensor memory #" + std::to_string(++cache().serial);
    state().memory.add(block->base, bytes, Range::External, stream.context->device->ordinal,
                       label + " (" + std::to_string(bytes) + " bytes)");
    state().history.forget(block->base, block->base + block->size);
    book(*block, stream, bytes, AccessKind::Write, "allocation", lock);
    return reinterpret_cast<void *>(block->base);
}

bool cache_free(void *base, Lock &lock)
{
    const auto address = reinterpret_cast<uint64_t>(base);
    Block *block = find(address);
    if (block == nullptr)
        return false;
    if (block->stream == nullptr) {
        cache().blocks.erase(address);
        return true;
    }
    for (Stream *user : block->captured ? std::set<Stream *>() : block->users)
        block->events.push_back(enqueue(*user, {"record_stream", nullptr, nullptr}));
    if (block->users.empty())
        book(*block, *block->stream, block->size, AccessKind::Free, "free", lock);
    block->users.clear();
    block->live = false;
    progress(lock);
    return true;
}

bool cache_record_stream(void *base, Stream &stream)
{
    Block *block = find(reinterpret_cast<uint64_t>(base));
    if (block == nullptr || !block->live || block->stream == nullptr)
        return false;
    if (&stream != block->stream)
        block->users.insert(&stream);
    return true;
}

static void abandon(bool all)
{
    auto &blocks = cache().blocks;
    for (auto at = blocks.begin(); at != blocks.end();) {
        Block &block = *at->second;
        if (!all && block.stream && !block.stream->dead) {
            block.events.clear(); // everything is done
            ++at;
            continue;
        }
        if (block.stream) {
            state().memory.remove(block.base);
            state().history.forget(block.base, block.base + block.size);
        }
        block.stream = nullptr;
        block.users.clear();
        block.events.clear();
        at = block.live ? std::next(at) : blocks.erase(at);
    }
}

void cache_abandon() { abandon(true); }
void cache_bury() { abandon(false); }

CacheCounts cache_counts()
{
    CacheCounts counts;
    for (const auto &[base, block] : cache().blocks) {
        if (block->stream == nullptr)
            continue;
        ++(block->live ? counts.live : block->events.empty() ? counts.free : counts.waiting);
    }
    return counts;
}

} // namespace sim
