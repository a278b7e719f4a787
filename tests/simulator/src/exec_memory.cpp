#include <algorithm>
#include <cstring>

#include "exec_values.hpp"

namespace ptx {
namespace {

std::string where(const Frame &f, const Insn &i)
{
    return f.launch->entry.name + " '" + i.name + "' at PTX line " + std::to_string(i.line);
}

[[noreturn]] void out_of_bounds(const Frame &f, const Insn &i, const char *space)
{
    throw Fault(kIllegalAddress, std::string(space) + " access out of bounds in " + where(f, i));
}

void check_alignment(const Frame &f, const Insn &i, uint64_t address, unsigned size)
{
    if (address % size != 0)
        throw Fault(kMisaligned, "misaligned " + std::to_string(size) + "-byte access in " + where(f, i));
}

bool inside(uint64_t address, unsigned size, const void *base, size_t length)
{
    const auto begin = reinterpret_cast<uint64_t>(base);
    return address >= begin && length >= size && address - begin <= length - size;
}

uint8_t *shared_access(const Frame &f, const Insn &i, uint64_t offset, unsigned size, const void *incoming)
{
    SharedMemory &shared = *f.shared;
    if (!inside(offset, size, nullptr, shared.bytes.size()))
        out_of_bounds(f, i, "shared");
    check_alignment(f, i, offset, size);
    uint8_t *at = &shared.bytes[offset];
    Memory &memory = f.launch->memory;
    const bool unchanged = incoming && std::memcmp(at, incoming, size) == 0;
    const bool atomic = i.op == Op::Atom;
    if (incoming ? shared.owners.write(memory.order, offset, size, f.segment, unchanged, atomic)
                 : shared.owners.read(memory.order, offset, size, f.segment))
        memory.conflict("threads race on shared memory in " + where(f, i));
    return at;
}

uint8_t *local_access(const Frame &f, const Insn &i, uint64_t offset, unsigned size)
{
    if (!inside(offset, size, nullptr, f.launch->entry.local_bytes))
        out_of_bounds(f, i, "local");
    check_alignment(f, i, offset, size);
    return f.local + offset;
}

uint8_t *global_access(const Frame &f, const Insn &i, uint64_t address, unsigned size, const void *incoming)
{
    check_alignment(f, i, address, size);
    f.launch->memory.access(
        {address, size, incoming != nullptr, i.op == Op::Atom, i.non_coherent, f.segment, incoming, &i});
    return reinterpret_cast<uint8_t *>(address);
}

// The host address of an access of `size` bytes, after every check.  `incoming` is what will be written there.
uint8_t *resolve(const Frame &f, const Insn &i, unsigned size, const void *incoming)
{
    const uint64_t address = raw(f, i, 0) + static_cast<uint64_t>(i.offset);
    const Launch &launch = *f.launch;
    const size_t shared = f.shared->bytes.size(), local = launch.entry.local_bytes;
    switch (i.space) {
    case Space::Shared: return shared_access(f, i, static_cast<uint32_t>(address), size, incoming);
    case Space::Local: return local_access(f, i, address, size);
    case Space::Param:
        if (incoming || !inside(address, size, launch.params, launch.entry.param_bytes))
            out_of_bounds(f, i, "parameter");
        return reinterpret_cast<uint8_t *>(address);
    case Space::Generic:
        if (inside(address, size, f.shared->bytes.data(), shared))
            return shared_access(f, i, address - reinterpret_cast<uint64_t>(f.shared->bytes.data()), size, incoming);
        if (inside(address, size, f.local, local))
            return local_access(f, i, address - reinterpret_cast<uint64_t>(f.local), size);
        if (!incoming && inside(address, size, launch.params, launch.entry.param_bytes))
            return reinterpret_cast<uint8_t *>(address);
        break;
    default: break;
    }
    return global_access(f, i, address, size, incoming);
}

uint64_t load_element(const uint8_t *at, Type type)
{
    uint64_t v = 0;
    std::memcpy(&v, at, size_of(type));
    if (is_signed(type)) { // a narrow signed load fills a wider register
        const unsigned unused = 64 - 8 * size_of(type);
        v = static_cast<uint64_t>(static_cast<int64_t>(v << unused) >> unused);
    }
    return v;
}

void load(Frame &f, const Insn &i)
{
    const unsigned size = size_of(i.type);
    const uint8_t *at = resolve(f, i, size * i.results, nullptr);
    for (unsigned k = 0; k < i.results; k++)
        f.r[i.d[k].index] = load_element(at + k * size, i.type);
}

void store(Frame &f, const Insn &i)
{
    const unsigned size = size_of(i.type), total = size * i.results;
    uint8_t values[8 * 8];
    for (unsigned k = 0; k < i.results; k++)
        std::memcpy(values + k * size, &f.r[i.d[k].index], size);
    std::memcpy(resolve(f, i, total, values), values, total);
}

template <class T>
T apply(const Insn &i, T old, T a, T b)
{
    if constexpr (std::is_floating_point_v<T>) {
        return i.atomic == Atomic::Add ? old + a : a;
    } else {
        using U = std::make_unsigned_t<T>;
        switch (i.atomic) {
        case Atomic::Add: return static_cast<T>(U(old) + U(a));
        case Atomic::And: return old & a;
        case Atomic::Or: return old | a;
        case Atomic::Xor: return old ^ a;
        case Atomic::Min: return std::min(old, a);
        case Atomic::Max: return std::max(old, a);
        case Atomic::Cas: return old == a ? b : old;
        case Atomic::Inc: return old >= a ? T(0) : static_cast<T>(old + 1);
        case Atomic::Dec: return old == 0 || old > a ? a : static_cast<T>(old - 1);
        default: return a; // Exch
        }
    }
}

template <class T>
struct AtomicUpdate {
    static void run(Frame &f, const Insn &i)
    {
        static const uint8_t unknown[8] = {}; // only its being there matters: an atomic is never "unchanged"
        uint8_t *at = resolve(f, i, sizeof(T), unknown);
        T old;
        std::memcpy(&old, at, sizeof old);
        const T now = apply<T>(i, old, get<T>(f, i, 1), i.sources > 2 ? get<T>(f, i, 2) : T());
        std::memcpy(at, &now, sizeof now);
        put<T>(f, i, old);
    }
};

Handler find_atomic(const Insn &i)
{
    if (size_of(i.type) < 4 || i.space == Space::Local || i.space == Space::Param)
        return nullptr;
    if (is_float(i.type))
        return i.atomic == Atomic::Add || i.atomic == Atomic::Exch ? for_float<AtomicUpdate>(i.type) : nullptr;
    return for_integer<AtomicUpdate>(i.type);
}

bool is_window(Space s) { return s == Space::Shared || s == Space::Local; }

uint64_t window(const Frame &f, Space space)
{
    return reinterpret_cast<uint64_t>(space == Space::Shared ? f.shared->bytes.data() : f.local);
}

// Shared and local addresses are offsets; everything else is a host address already.
void cvta(Frame &f, const Insn &i) { put_raw(f, i, raw(f, i, 0) + (is_window(i.space) ? window(f, i.space) : 0)); }
void cvta_to(Frame &f, const Insn &i) { put_raw(f, i, raw(f, i, 0) - (is_window(i.space) ? window(f, i.space) : 0)); }

} // namespace

Handler find_memory(const Insn &i)
{
    const unsigned bytes = size_of(i.type) * i.results;
    switch (i.op) {
    case Op::Ld: return bytes > 0 && bytes <= 32 && i.type != Type::Pred ? load : nullptr;
    case Op::St: return bytes > 0 && bytes <= 32 && i.type != Type::Pred && i.space != Space::Const ? store : nullptr;
    case Op::Atom: return find_atomic(i);
    case Op::Cvta: return size_of(i.type) == 8 ? cvta : nullptr;
    case Op::CvtaTo: return size_of(i.type) == 8 ? cvta_to : nullptr;
    default: return nullptr;
    }
}

} // namespace ptx
