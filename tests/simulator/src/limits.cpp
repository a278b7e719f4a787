#include "limits.hpp"

#include <algorithm>

namespace sim {
namespace {

constexpr size_t kKiB = 1024;
constexpr unsigned kWarp = 32;
constexpr unsigned kWarpRegisters = 256; // a warp's registers come in such pieces
constexpr unsigned kWarpsAtOnce = 4;     // so many warps' registers are given out together
constexpr unsigned kUnbounded = 32;      // registers a thread of a kernel without bounds
constexpr size_t kReservedShared = kKiB; // of every block, since sm_80

// T4, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
constexpr Limits kDevices[] = {
    {75, 40, 1024, 16, 64 * kKiB, 64 * kKiB, 4096 * kKiB},
    {80, 108, 2048, 32, 164 * kKiB, 163 * kKiB, 40960 * kKiB},
    {86, 82, 1536, 16, 100 * kKiB, 99 * kKiB, 6144 * kKiB},
    {89, 128, 1536, 24, 100 * kKiB, 99 * kKiB, 73728 * kKiB},
    {90, 132, 2048, 32, 228 * kKiB, 227 * kKiB, 51200 * kKiB},
    {100, 148, 2048, 32, 228 * kKiB, 227 * kKiB, 129024 * kKiB},
    {120, 170, 1536, 24, 100 * kKiB, 99 * kKiB, 98304 * kKiB},
};

unsigned round_up(unsigned value, unsigned to) { return (value + to - 1) / to * to; }

} // namespace

// Of a capability that is not listed, the nearest one below.
const Limits &limits_of(int capability)
{
    const Limits *found = kDevices;
    for (const Limits &device : kDevices)
        if (device.capability <= capability)
            found = &device;
    return *found;
}

unsigned registers_of(const ptx::Entry &entry)
{
    if (entry.max_registers)
        return entry.max_registers;
    if (entry.min_blocks == 0)
        return kUnbounded;
    const unsigned warps = (entry.max_threads + kWarp - 1) / kWarp;
    return std::min(255u, kRegisters / (warps * entry.min_blocks) / kWarpRegisters * kWarpRegisters / kWarp);
}

int resident_blocks(const ptx::Entry &entry, int capability, unsigned threads, size_t dynamic_shared)
{
    const Limits &limits = limits_of(capability);
    const unsigned warps = (threads + kWarp - 1) / kWarp;
    const unsigned of_a_warp = round_up(registers_of(entry) * kWarp, kWarpRegisters);
    size_t blocks = static_cast<size_t>(limits.blocks);
    blocks = std::min<size_t>(blocks, static_cast<unsigned>(limits.threads) / (warps * kWarp));
    blocks = std::min<size_t>(blocks, kRegisters / of_a_warp / kWarpsAtOnce * kWarpsAtOnce / warps);
    const size_t shared = entry.shared_bytes + dynamic_shared;
    if (shared)
        blocks = std::min(blocks, limits.shared / (shared + (capability >= 80 ? kReservedShared : 0)));
    return static_cast<int>(blocks);
}

} // namespace sim
