// A framework's caching allocator, by the rules of PyTorch's for CUDA.  Everything with the lock held.
//
// Memory belongs to the stream that was current when it was allocated.  Memory that is freed is that stream's again
// at once: the next allocation there may have the same bytes while other streams still use them, unless they were
// recorded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "objects.hpp"

namespace sim {

void *cache_allocate(size_t bytes, Stream &stream, Lock &lock);
bool cache_free(void *base, Lock &lock); // false: no memory of the cache
bool cache_record_stream(void *base, Stream &stream);
// Forgets all streams.  Memory that is still referred to becomes ordinary host memory, which cache_free frees.
void cache_abandon();
// The same for memory of streams that are dead.  All work is done.
void cache_bury();

// What the device holds for the framework: live blocks, and free ones.
struct CacheCounts {
    size_t live = 0, free = 0, waiting = 0;
};
CacheCounts cache_counts();

} // namespace sim
