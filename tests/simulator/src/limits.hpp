// How large the devices are, by compute capability, and how many blocks of a kernel one multiprocessor holds.
#pragma once

#include <cstddef>

#include "ptx.hpp"

namespace sim {

struct Limits {
    int capability;
    int multiprocessors;
    int threads, blocks;          // resident in one multiprocessor
    size_t shared, shared_opt_in; // of one multiprocessor, and of one block that asks for it
    size_t l2_cache;
};

constexpr unsigned kRegisters = 65536; // of one multiprocessor, and the most of one block

const Limits &limits_of(int capability);

// Registers a thread: what the compiler may use at most for a kernel with such bounds; machine code is not read.
unsigned registers_of(const ptx::Entry &entry);

// Blocks that are resident in one multiprocessor at a time; 0: the kernel cannot be launched so.
int resident_blocks(const ptx::Entry &entry, int capability, unsigned threads, size_t dynamic_shared);

} // namespace sim
