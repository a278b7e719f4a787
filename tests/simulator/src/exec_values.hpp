// Reading operands and writing results, for the handlers.
#pragma once

#include <cmath>
#include <type_traits>

#include "half.hpp"
#include "ptx_exec.hpp"

namespace ptx {

inline uint64_t raw(const Frame &f, const Insn &i, int k) { return f.r[i.s[static_cast<size_t>(k)].index]; }
inline bool pred(const Frame &f, const Insn &i, int k)
{
    return (raw(f, i, k) != 0) != i.s[static_cast<size_t>(k)].invert;
}
inline void put_raw(Frame &f, const Insn &i, uint64_t v) { f.r[i.d[0].index] = v; }

inline float flush(float x, bool ftz) { return ftz && std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// Operand k as a T.  float honours .ftz, which flushes inputs as well as results.
template <class T>
T get(const Frame &f, const Insn &i, int k)
{
    if constexpr (std::is_same_v<T, float>)
        return flush(bit_cast<float>(static_cast<uint32_t>(raw(f, i, k))), i.ftz);
    else if constexpr (std::is_same_v<T, double>)
        return bit_cast<double>(raw(f, i, k));
    else
        return static_cast<T>(raw(f, i, k));
}

template <class T>
void put(Frame &f, const Insn &i, T v)
{
    if constexpr (std::is_same_v<T, float>) {
        if (std::isnan(v))
            return put_raw(f, i, i.sat ? 0 : 0x7fffffffu); // the device's one NaN; .sat turns it into zero
        if (i.sat)
            v = v > 0.0f ? std::fmin(v, 1.0f) : 0.0f;
        put_raw(f, i, bit_cast<uint32_t>(flush(v, i.ftz)));
    } else if constexpr (std::is_same_v<T, double>) {
        put_raw(f, i, bit_cast<uint64_t>(v));
    } else {
        put_raw(f, i, static_cast<std::make_unsigned_t<T>>(v));
    }
}

// The instantiation of H for an integer type, NULL for any other.
template <template <class> class H>
Handler for_integer(Type t)
{
    switch (t) {
    case Type::U16:
    case Type::B16: return H<uint16_t>::run;
    case Type::S16: return H<int16_t>::run;
    case Type::U32:
    case Type::B32: return H<uint32_t>::run;
    case Type::S32: return H<int32_t>::run;
    case Type::U64:
    case Type::B64: return H<uint64_t>::run;
    case Type::S64: return H<int64_t>::run;
    default: return nullptr;
    }
}

template <template <class> class H>
Handler for_float(Type t)
{
    return t == Type::F32 ? H<float>::run : t == Type::F64 ? H<double>::run : nullptr;
}

template <template <class> class H>
Handler for_number(Type t)
{
    const Handler h = for_float<H>(t);
    return h ? h : for_integer<H>(t);
}

} // namespace ptx
