// Between the driver functions and the control surface.
#pragma once

#include <atomic>
#include <cstdint>

namespace sim {

// Shared between processes, so that a parent learns what its forked children did.
std::atomic<uint64_t> &forked_calls();

} // namespace sim
