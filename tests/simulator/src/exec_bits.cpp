#include <algorithm>

#include "exec_values.hpp"

namespace ptx {
namespace {

constexpr uint64_t mask(unsigned bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }
unsigned bits_of(const Insn &i) { return 8 * size_of(i.type); }
void put_bits(Frame &f, const Insn &i, uint64_t v) { put_raw(f, i, v & mask(bits_of(i))); }

void bit_and(Frame &f, const Insn &i) { put_bits(f, i, raw(f, i, 0) & raw(f, i, 1)); }
void bit_or(Frame &f, const Insn &i) { put_bits(f, i, raw(f, i, 0) | raw(f, i, 1)); }
void bit_xor(Frame &f, const Insn &i) { put_bits(f, i, raw(f, i, 0) ^ raw(f, i, 1)); }
void bit_not(Frame &f, const Insn &i) { put_bits(f, i, ~raw(f, i, 0)); }

void pred_and(Frame &f, const Insn &i) { put_raw(f, i, pred(f, i, 0) && pred(f, i, 1)); }
void pred_or(Frame &f, const Insn &i) { put_raw(f, i, pred(f, i, 0) || pred(f, i, 1)); }
void pred_xor(Frame &f, const Insn &i) { put_raw(f, i, pred(f, i, 0) != pred(f, i, 1)); }
void pred_not(Frame &f, const Insn &i) { put_raw(f, i, !pred(f, i, 0)); }
void pred_mov(Frame &f, const Insn &i) { put_raw(f, i, pred(f, i, 0)); }

void mov(Frame &f, const Insn &i) { put_bits(f, i, raw(f, i, 0)); }
void selp(Frame &f, const Insn &i) { put_bits(f, i, pred(f, i, 2) ? raw(f, i, 0) : raw(f, i, 1)); }

// A shift by more than the width is clamped, not taken modulo it.
template <class T>
struct Shl {
    static void run(Frame &f, const Insn &i)
    {
        const uint32_t by = get<uint32_t>(f, i, 1);
        put<T>(f, i, by >= 8 * sizeof(T) ? T(0) : static_cast<T>(get<uint64_t>(f, i, 0) << by));
    }
};

template <class T>
struct Shr {
    static void run(Frame &f, const Insn &i)
    {
        const uint32_t by = get<uint32_t>(f, i, 1), width = 8 * sizeof(T);
        const T a = get<T>(f, i, 0);
        put<T>(f, i, by < width ? static_cast<T>(a >> by) : std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T(0));
    }
};

void pack(Frame &f, const Insn &i)
{
    const unsigned part = bits_of(i) / i.sources;
    uint64_t v = 0;
    for (unsigned k = 0; k < i.sources; k++)
        v |= (raw(f, i, static_cast<int>(k)) & mask(part)) << (part * k);
    put_raw(f, i, v);
}

void unpack(Frame &f, const Insn &i)
{
    const unsigned part = bits_of(i) / i.results;
    const uint64_t v = raw(f, i, 0);
    for (unsigned k = 0; k < i.results; k++)
        f.r[i.d[k].index] = v >> (part * k) & mask(part);
}

void shf(Frame &f, const Insn &i)
{
    const uint32_t asked = get<uint32_t>(f, i, 2), by = i.clamp ? std::min(asked, 32u) : asked & 31;
    const uint64_t both = raw(f, i, 1) << 32 | get<uint32_t>(f, i, 0);
    put<uint32_t>(f, i, static_cast<uint32_t>(i.right ? both >> by : (both << by) >> 32));
}

// The 8-bit table is indexed by one bit of each operand.
void lop3(Frame &f, const Insn &i)
{
    const uint32_t a = get<uint32_t>(f, i, 0), b = get<uint32_t>(f, i, 1), c = get<uint32_t>(f, i, 2);
    const uint32_t table = get<uint32_t>(f, i, 3);
    uint32_t v = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1)
            v |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    put<uint32_t>(f, i, v);
}

void prmt(Frame &f, const Insn &i)
{
    const uint64_t bytes = raw(f, i, 1) << 32 | get<uint32_t>(f, i, 0);
    const uint32_t selectors = get<uint32_t>(f, i, 2);
    uint32_t v = 0;
    for (unsigned k = 0; k < 4; k++) {
        const uint32_t selector = selectors >> (4 * k) & 15;
        uint32_t byte = bytes >> (8 * (selector & 7)) & 0xff;
        if (selector & 8) // replicate the sign
            byte = byte & 0x80 ? 0xff : 0;
        v |= byte << (8 * k);
    }
    put<uint32_t>(f, i, v);
}

template <class T>
struct Bfe {
    static void run(Frame &f, const Insn &i)
    {
        constexpr unsigned width = 8 * sizeof(T);
        const unsigned from = raw(f, i, 1) & 0xff, length = raw(f, i, 2) & 0xff;
        if (length == 0)
            return put<T>(f, i, T(0));
        const uint64_t a = raw(f, i, 0) & mask(width);
        const unsigned last = std::min(from + length - 1, width - 1);
        const bool negative = std::is_signed_v<T> && (a >> last & 1);
        const uint64_t field = from >= width ? 0 : a >> from & mask(length);
        const unsigned filled = from >= width ? 0 : last - from + 1;
        put<T>(f, i, static_cast<T>(negative ? field | ~mask(filled) : field));
    }
};

template <class T>
struct Bfi {
    static void run(Frame &f, const Insn &i)
    {
        const unsigned from = raw(f, i, 2) & 0xff, length = raw(f, i, 3) & 0xff;
        const uint64_t field = from >= 64 ? 0 : mask(length) << from;
        const uint64_t inserted = from >= 64 ? 0 : raw(f, i, 0) << from;
        put<T>(f, i, static_cast<T>((raw(f, i, 1) & ~field) | (inserted & field)));
    }
};

template <class T>
struct Brev {
    static void run(Frame &f, const Insn &i)
    {
        const T a = get<T>(f, i, 0);
        T v = 0;
        for (unsigned k = 0; k < 8 * sizeof(T); k++)
            v = static_cast<T>(v | T(a >> k & 1) << (8 * sizeof(T) - 1 - k));
        put<T>(f, i, v);
    }
};

void popc(Frame &f, const Insn &i)
{
    put_raw(f, i, static_cast<unsigned>(__builtin_popcountll(raw(f, i, 0) & mask(bits_of(i)))));
}

void clz(Frame &f, const Insn &i)
{
    const uint64_t a = raw(f, i, 0) & mask(bits_of(i));
    put_raw(f, i, a ? static_cast<unsigned>(__builtin_clzll(a)) - (64 - bits_of(i)) : bits_of(i));
}

Handler find_logic(const Insn &i)
{
    const bool p = i.type == Type::Pred;
    switch (i.op) {
    case Op::And: return p ? pred_and : bit_and;
    case Op::Or: return p ? pred_or : bit_or;
    case Op::Xor: return p ? pred_xor : bit_xor;
    case Op::Not: return p ? pred_not : bit_not;
    case Op::Mov: return p ? pred_mov : mov;
    default: return nullptr;
    }
}

bool is_word(Type t) { return size_of(t) == 4 || size_of(t) == 8; }

} // namespace

Handler find_bits(const Insn &i)
{
    if (i.type == Type::None)
        return nullptr;
    switch (i.op) {
    case Op::Selp: return i.type == Type::Pred ? nullptr : selp;
    case Op::Shl: return for_integer<Shl>(i.type);
    case Op::Shr: return for_integer<Shr>(i.type);
    case Op::Pack: return bits_of(i) % i.sources == 0 ? pack : nullptr;
    case Op::Unpack: return bits_of(i) % i.results == 0 ? unpack : nullptr;
    case Op::Shf: return size_of(i.type) == 4 ? shf : nullptr;
    case Op::Lop3: return size_of(i.type) == 4 ? lop3 : nullptr;
    case Op::Prmt: return size_of(i.type) == 4 ? prmt : nullptr;
    case Op::Bfe: return is_word(i.type) ? for_integer<Bfe>(i.type) : nullptr;
    case Op::Bfi: return is_word(i.type) ? for_integer<Bfi>(i.type) : nullptr;
    case Op::Brev: return is_word(i.type) ? for_integer<Brev>(i.type) : nullptr;
    case Op::Popc: return is_word(i.type) ? popc : nullptr;
    case Op::Clz: return is_word(i.type) ? clz : nullptr;
    default: return find_logic(i);
    }
}

} // namespace ptx
