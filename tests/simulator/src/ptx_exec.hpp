// Execution of a kernel: one thread after the other, from barrier to barrier, blocks and threads in seeded order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ownership.hpp"
#include "ptx.hpp"

namespace ptx {

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Access {
    uint64_t address;
    unsigned size;
    bool write, atomic, non_coherent;
    uint32_t segment;
    const void *incoming; // a write's bytes; NULL for a read
    const Insn *insn;
};

// What the interpreter asks of memory outside the kernel.  Addresses are host addresses.
class Memory {
public:
    virtual ~Memory() = default;
    virtual void access(const Access &access) = 0;      // throws Fault when it is illegal
    virtual void conflict(const std::string &what) = 0; // unordered accesses inside the kernel
    Order order;
};

struct Launch {
    const Entry &entry;
    const uint8_t *params; // entry.param_bytes, alive while the kernel runs
    uint8_t *storage;      // the module's variables
    Dim3 grid, block;
    size_t dynamic_shared;
    uint64_t seed; // 0: blocks and threads in ascending order
    Memory &memory;
};

// Runs the kernel; throws Fault.  counts[i] becomes how often instruction i was executed.
void run(const Launch &launch, std::vector<uint64_t> &counts);

// ------------------------------------------------------------------------- between the parser and the handlers

struct SharedMemory {
    SharedMemory(size_t size, unsigned granule) : bytes(size, 0xcd), owners(size, granule) {}
    std::vector<uint8_t> bytes;
    Ownership owners;
};

struct Frame {
    enum State : uint8_t { Running, AtBarrier, Done };
    uint64_t *r = nullptr;
    const Launch *launch = nullptr;
    SharedMemory *shared = nullptr;
    uint8_t *local = nullptr;
    uint32_t pc = 0;
    uint32_t segment = 0;
    State state = Running;
    uint64_t back_edges = 0;
};

// The handler of a parsed instruction, or NULL when its combination of types and modifiers is not simulated.
Handler find_handler(const Insn &insn);

// Parts of find_handler, one a file.
Handler find_arithmetic(const Insn &insn);
Handler find_bits(const Insn &insn);
Handler find_convert(const Insn &insn);
Handler find_memory(const Insn &insn);
Handler find_control(const Insn &insn);

} // namespace ptx
