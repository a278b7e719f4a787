#include <limits>

#include "exec_values.hpp"

namespace ptx {
namespace {

// Every float type widens to double exactly, so one rounding is left to do.
double read_float(const Frame &f, const Insn &i, int k, Type t)
{
    const uint64_t bits = raw(f, i, k);
    switch (t) {
    case Type::F16: return from_f16(static_cast<uint16_t>(bits));
    case Type::BF16: return from_bf16(static_cast<uint16_t>(bits));
    case Type::F32: return get<float>(f, i, k);
    default: return bit_cast<double>(bits);
    }
}

float to_float(double x, bool towards_zero)
{
    const float nearest = static_cast<float>(x);
    return towards_zero && std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest;
}

uint64_t encode_float(const Insn &i, double x, Type t)
{
    const bool zero = i.round == Round::Zero;
    if (i.sat)
        x = x > 0.0 ? std::fmin(x, 1.0) : 0.0;
    switch (t) {
    case Type::F16:
    case Type::F16x2: return to_f16(x, zero);
    case Type::BF16:
    case Type::BF16x2: return to_bf16(x, zero);
    case Type::F32: return std::isnan(x) ? 0x7fffffffu : bit_cast<uint32_t>(flush(to_float(x, zero), i.ftz));
    default: return bit_cast<uint64_t>(x);
    }
}

double to_integral(double x, Round round)
{
    switch (round) {
    case Round::IntNearest: return std::nearbyint(x);
    case Round::IntZero: return std::trunc(x);
    case Round::IntDown: return std::floor(x);
    case Round::IntUp: return std::ceil(x);
    default: return x;
    }
}

void float_to_float(Frame &f, const Insn &i)
{
    put_raw(f, i, encode_float(i, to_integral(read_float(f, i, 0, i.source), i.round), i.type));
}

void float_pair(Frame &f, const Insn &i) // the first source becomes the upper half
{
    const uint64_t high = encode_float(i, read_float(f, i, 0, Type::F32), i.type);
    const uint64_t low = encode_float(i, read_float(f, i, 1, Type::F32), i.type);
    put_raw(f, i, high << 16 | low);
}

uint64_t truncate(uint64_t v, Type t) { return size_of(t) == 8 ? v : v & ((uint64_t{1} << 8 * size_of(t)) - 1); }

int64_t sign_extend(uint64_t v, Type t)
{
    const unsigned unused = 64 - 8 * size_of(t);
    return static_cast<int64_t>(v << unused) >> unused;
}

// Out of range is clamped.  NaN is zero for narrow integers and the middle of the range for 64 bits or from f64.
void float_to_int(Frame &f, const Insn &i)
{
    const double x = to_integral(read_float(f, i, 0, i.source), i.round);
    const int bits = 8 * static_cast<int>(size_of(i.type));
    const bool is_s = is_signed(i.type);
    const uint64_t largest = is_s ? (uint64_t{1} << (bits - 1)) - 1 : truncate(~uint64_t{0}, i.type);
    const uint64_t smallest = is_s ? uint64_t{1} << (bits - 1) : 0;
    if (std::isnan(x))
        return put_raw(f, i, bits == 64 || i.source == Type::F64 ? uint64_t{1} << (bits - 1) : 0);
    if (x >= std::ldexp(1.0, is_s ? bits - 1 : bits))
        return put_raw(f, i, largest);
    if (x < (is_s ? -std::ldexp(1.0, bits - 1) : 0.0))
        return put_raw(f, i, smallest);
    put_raw(f, i, truncate(x < 0 ? static_cast<uint64_t>(static_cast<int64_t>(x)) : static_cast<uint64_t>(x), i.type));
}

void int_to_float(Frame &f, const Insn &i)
{
    const uint64_t u = truncate(raw(f, i, 0), i.source);
    const int64_t s = sign_extend(u, i.source);
    if (i.type == Type::F32) // straight to float: 64 bits would be rounded twice through double
        put<float>(f, i, is_signed(i.source) ? static_cast<float>(s) : static_cast<float>(u));
    else
        put_raw(f, i, encode_float(i, is_signed(i.source) ? static_cast<double>(s) : static_cast<double>(u), i.type));
}

void int_to_int(Frame &f, const Insn &i)
{
    const uint64_t u = truncate(raw(f, i, 0), i.source);
    put_raw(f, i, truncate(is_signed(i.source) ? static_cast<uint64_t>(sign_extend(u, i.source)) : u, i.type));
}

bool is_integer(Type t) { return is_signed(t) || t == Type::U8 || t == Type::U16 || t == Type::U32 || t == Type::U64; }

Handler find_cvt(const Insn &i)
{
    const bool nearest = i.round == Round::Nearest, rounds = nearest || i.round == Round::Zero;
    const bool integral = i.round != Round::None && !rounds;
    const bool narrows = size_of(i.type) < size_of(i.source);
    if (is_float(i.type) && is_float(i.source)) {
        if (i.type == i.source) // only to a whole number, or with .sat
            return rounds ? nullptr : float_to_float;
        const bool half_to_half = !narrows && size_of(i.type) == 2;
        return narrows == rounds && !integral && !half_to_half ? float_to_float : nullptr;
    }
    if (is_integer(i.type) && is_float(i.source))
        return integral && !i.sat ? float_to_int : nullptr; // .sat is what happens anyway, but nvcc never writes it
    if (is_float(i.type) && is_integer(i.source))
        return nearest && (size_of(i.type) > 2 || size_of(i.source) <= 4) ? int_to_float : nullptr;
    if (is_integer(i.type) && is_integer(i.source))
        return i.round == Round::None && !i.sat ? int_to_int : nullptr;
    return nullptr;
}

} // namespace

Handler find_convert(const Insn &i)
{
    if (i.op == Op::Cvt)
        return find_cvt(i);
    if (i.op == Op::CvtPair)
        return i.source == Type::F32 && (i.round == Round::Nearest || i.round == Round::Zero) && !i.sat ? float_pair : nullptr;
    return nullptr;
}

} // namespace ptx
