#include <algorithm>
#include <limits>

#include "exec_values.hpp"

namespace ptx {
namespace {

template <class T>
constexpr bool is_int = std::is_integral_v<T>;

// Integers wrap: the sum is formed unsigned, where that is defined.
template <class T>
using Wrap = typename std::conditional_t<is_int<T>, std::make_unsigned<std::conditional_t<is_int<T>, T, int>>,
                                         std::common_type<T>>::type;

template <class T>
struct Add {
    static void run(Frame &f, const Insn &i)
    {
        put<T>(f, i, static_cast<T>(Wrap<T>(get<T>(f, i, 0)) + Wrap<T>(get<T>(f, i, 1))));
    }
};

template <class T>
struct Sub {
    static void run(Frame &f, const Insn &i)
    {
        put<T>(f, i, static_cast<T>(Wrap<T>(get<T>(f, i, 0)) - Wrap<T>(get<T>(f, i, 1))));
    }
};

template <class T>
struct FloatMul {
    static void run(Frame &f, const Insn &i) { put<T>(f, i, get<T>(f, i, 0) * get<T>(f, i, 1)); }
};

template <class T>
struct Fma {
    static void run(Frame &f, const Insn &i)
    {
        put<T>(f, i, std::fma(get<T>(f, i, 0), get<T>(f, i, 1), get<T>(f, i, 2)));
    }
};

template <class T>
struct FloatDiv {
    static void run(Frame &f, const Insn &i) { put<T>(f, i, get<T>(f, i, 0) / get<T>(f, i, 1)); }
};

template <class T>
struct Rcp {
    static void run(Frame &f, const Insn &i) { put<T>(f, i, T(1) / get<T>(f, i, 0)); }
};

template <class T>
struct Sqrt {
    static void run(Frame &f, const Insn &i) { put<T>(f, i, std::sqrt(get<T>(f, i, 0))); }
};

// mul and mad of integers.  128 bits hold every product exactly.
template <class T>
struct IntMad {
    static void run(Frame &f, const Insn &i)
    {
        using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        constexpr int bits = 8 * sizeof(T);
        const Wide product = Wide(get<T>(f, i, 0)) * Wide(get<T>(f, i, 1));
        const uint64_t addend = i.op == Op::Mad ? raw(f, i, 2) : 0;
        const auto low = static_cast<uint64_t>(product), high = static_cast<uint64_t>(product >> bits);
        if (i.half == Half::Wide)
            put_raw(f, i, bits == 16 ? static_cast<uint32_t>(low + addend) : low + addend);
        else
            put<T>(f, i, static_cast<T>((i.half == Half::Hi ? high : low) + addend));
    }
};

// Division by zero gives all ones on the device, and the remainder is then the dividend.
template <class T>
struct IntDiv {
    static void run(Frame &f, const Insn &i)
    {
        const T a = get<T>(f, i, 0), b = get<T>(f, i, 1);
        const bool rem = i.op == Op::Rem;
        if (b == 0)
            return put<T>(f, i, rem ? a : static_cast<T>(~T(0)));
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) // the one quotient that overflows
            return put<T>(f, i, rem ? T(0) : static_cast<T>(Wrap<T>(0) - Wrap<T>(a)));
        put<T>(f, i, static_cast<T>(rem ? a % b : a / b));
    }
};

// -0 is below +0; of a number and a NaN the number wins unless .NaN asks for the NaN.
template <class T>
struct MinMax {
    static void run(Frame &f, const Insn &i)
    {
        const T a = get<T>(f, i, 0), b = get<T>(f, i, 1);
        const bool min = i.op == Op::Min;
        if constexpr (!is_int<T>) {
            if (std::isnan(a) || std::isnan(b))
                return put<T>(f, i, i.nan ? std::numeric_limits<T>::quiet_NaN() : std::isnan(a) ? b : a);
            if (a == b)
                return put<T>(f, i, std::signbit(a) == min ? a : b);
        }
        put<T>(f, i, min ? std::min(a, b) : std::max(a, b));
    }
};

// abs and neg of floats move only the sign bit, but still flush; NaN becomes canonical as in every result.
template <class T>
struct Abs {
    static void run(Frame &f, const Insn &i)
    {
        const T a = get<T>(f, i, 0);
        if constexpr (is_int<T>)
            put<T>(f, i, a < 0 ? static_cast<T>(Wrap<T>(0) - Wrap<T>(a)) : a);
        else
            put<T>(f, i, std::fabs(a));
    }
};

template <class T>
struct Neg {
    static void run(Frame &f, const Insn &i)
    {
        const T a = get<T>(f, i, 0);
        put<T>(f, i, is_int<T> ? static_cast<T>(Wrap<T>(0) - Wrap<T>(a)) : static_cast<T>(-a));
    }
};

template <class T>
struct Copysign { // copysign d, a, b: the sign of a, the magnitude of b
    static void run(Frame &f, const Insn &i) { put<T>(f, i, std::copysign(get<T>(f, i, 1), get<T>(f, i, 0))); }
};

template <class T>
bool compare(Compare c, T a, T b)
{
    bool unordered = false;
    if constexpr (!is_int<T>)
        unordered = std::isnan(a) || std::isnan(b);
    switch (c) {
    case Compare::Eq: return a == b;
    case Compare::Ne: return !unordered && a != b;
    case Compare::Lt:
    case Compare::Lo: return a < b;
    case Compare::Le:
    case Compare::Ls: return a <= b;
    case Compare::Gt:
    case Compare::Hi: return a > b;
    case Compare::Ge:
    case Compare::Hs: return a >= b;
    case Compare::Equ: return unordered || a == b;
    case Compare::Neu: return unordered || a != b;
    case Compare::Ltu: return unordered || a < b;
    case Compare::Leu: return unordered || a <= b;
    case Compare::Gtu: return unordered || a > b;
    case Compare::Geu: return unordered || a >= b;
    case Compare::Num: return !unordered;
    case Compare::Nan: return unordered;
    }
    return false;
}

bool combine(Bool how, bool value, bool other)
{
    switch (how) {
    case Bool::And: return value && other;
    case Bool::Or: return value || other;
    case Bool::Xor: return value != other;
    default: return value;
    }
}

template <class T>
struct Setp {
    static void run(Frame &f, const Insn &i)
    {
        const bool value = compare<T>(i.compare, get<T>(f, i, 0), get<T>(f, i, 1));
        const bool other = i.combine != Bool::None && pred(f, i, 2);
        put_raw(f, i, combine(i.combine, value, other));
        if (i.results > 1)
            f.r[i.d[1].index] = combine(i.combine, !value, other);
    }
};

void testp(Frame &f, const Insn &i)
{
    const float x = bit_cast<float>(static_cast<uint32_t>(raw(f, i, 0)));
    const int kind = std::fpclassify(x);
    switch (i.test) {
    case Test::Finite: return put_raw(f, i, std::isfinite(x));
    case Test::Infinite: return put_raw(f, i, kind == FP_INFINITE);
    case Test::Number: return put_raw(f, i, kind != FP_NAN);
    case Test::NotANumber: return put_raw(f, i, kind == FP_NAN);
    case Test::Normal: return put_raw(f, i, kind == FP_NORMAL);
    case Test::Subnormal: return put_raw(f, i, kind == FP_SUBNORMAL);
    }
}

bool float_comparison(Compare c) { return c >= Compare::Equ; }

Handler find_setp(const Insn &i)
{
    return float_comparison(i.compare) ? for_float<Setp>(i.type) : for_number<Setp>(i.type);
}

Handler find_multiply(const Insn &i)
{
    if (i.half == Half::Wide && size_of(i.type) == 8)
        return nullptr;
    const Handler h = i.op == Op::Mul ? for_float<FloatMul>(i.type) : nullptr;
    return h ? h : for_integer<IntMad>(i.type);
}

} // namespace

Handler find_arithmetic(const Insn &i)
{
    switch (i.op) {
    case Op::Add: return for_number<Add>(i.type);
    case Op::Sub: return for_number<Sub>(i.type);
    case Op::Mul:
    case Op::Mad: return find_multiply(i);
    case Op::Fma: return for_float<Fma>(i.type);
    case Op::Div:
    case Op::Rem: {
        const Handler h = i.op == Op::Div ? for_float<FloatDiv>(i.type) : nullptr;
        return h ? h : for_integer<IntDiv>(i.type);
    }
    case Op::Rcp: return for_float<Rcp>(i.type);
    case Op::Sqrt: return for_float<Sqrt>(i.type);
    case Op::Min:
    case Op::Max: return for_number<MinMax>(i.type);
    case Op::Abs: return for_number<Abs>(i.type);
    case Op::Neg: return for_number<Neg>(i.type);
    case Op::Copysign: return for_float<Copysign>(i.type);
    case Op::Setp: return find_setp(i);
    case Op::Testp: return i.type == Type::F32 ? testp : nullptr;
    default: return nullptr;
    }
}

} // namespace ptx
