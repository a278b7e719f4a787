// Half-precision numbers as the device converts them: to nearest even or towards zero, subnormals kept, NaN canonical.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx {

template <class To, class From>
To bit_cast(From from)
{
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A 16-bit format with one sign bit and `mantissa` stored bits.
struct HalfFormat {
    int mantissa;
    int min_exponent; // of the smallest normal number
};

constexpr HalfFormat kF16{10, -14};
constexpr HalfFormat kBF16{7, -126};

// One rounding from double.  float goes through double exactly, so it is rounded once too.
inline uint16_t narrow(double x, HalfFormat f, bool towards_zero)
{
    constexpr uint64_t hidden = uint64_t{1} << 52;
    const uint64_t u = bit_cast<uint64_t>(x);
    const uint16_t sign = static_cast<uint16_t>(u >> 48 & 0x8000);
    const int stored = static_cast<int>(u >> 52 & 0x7ff);
    const uint64_t fraction = u & (hidden - 1);
    const uint16_t infinity = static_cast<uint16_t>((0x7fff >> f.mantissa) << f.mantissa);
    if (stored == 0x7ff)
        return fraction != 0 ? 0x7fff : static_cast<uint16_t>(sign | infinity);

    const int exponent = stored - 1023;
    const int lost = 52 - f.mantissa + (exponent < f.min_exponent ? f.min_exponent - exponent : 0);
    if (stored == 0 || lost > 53) // below half of the smallest subnormal
        return sign;
    const uint64_t significand = fraction | hidden;
    uint64_t kept = significand >> lost;
    const uint64_t rest = significand - (kept << lost), tie = uint64_t{1} << (lost - 1);
    kept += !towards_zero && (rest > tie || (rest == tie && (kept & 1)));
    // A carry out of the significand moves into the exponent by itself: the encoding is monotonic.
    const int above = exponent > f.min_exponent ? exponent - f.min_exponent : 0;
    const uint64_t bits = (static_cast<uint64_t>(above) << f.mantissa) + kept;
    const uint64_t largest = towards_zero ? infinity - 1 : infinity;
    return static_cast<uint16_t>(sign | (bits > largest ? largest : bits));
}

inline uint16_t to_f16(double x, bool towards_zero = false) { return narrow(x, kF16, towards_zero); }
inline uint16_t to_bf16(double x, bool towards_zero = false) { return narrow(x, kBF16, towards_zero); }

inline float from_bf16(uint16_t h) { return bit_cast<float>(static_cast<uint32_t>(h) << 16); }

inline float from_f16(uint16_t h)
{
    const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ffu;
    if (exponent == 31)
        return bit_cast<float>(fraction != 0 ? 0x7fffffffu : sign | 0x7f800000u);
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

} // namespace ptx
