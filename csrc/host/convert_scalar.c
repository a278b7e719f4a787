/* Portable kernels, one element at a time with integer arithmetic: the fallback everywhere, and the plainest
 * statement of what the others must compute. */
#include <stdint.h>
#include <string.h>

#include "host/convert_kernel.h"

static inline uint32_t
bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float
float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- bfloat16: the upper half of a float ---- */

static inline float
from_bf16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* Adding just under half a unit of the last place, plus its parity, carries into the upper half exactly when
 * round-to-nearest-even goes up; the carry into the exponent is what overflow to infinity needs. */
static inline uint16_t
to_bf16(float value, uint32_t nan)
{
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return (uint16_t)nan;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- float16: 5 bits of exponent, 10 of mantissa ---- */

#define F16_SMALLEST_NORMAL 0x38800000u /* 2^-14 as a float */
#define F16_OVERFLOW 0x47800000u        /* 2^16; from 65520 on, rounding carries into infinity by itself */
#define F16_REBIAS ((127u - 15u) << 23) /* difference of the exponents' biases */

static inline float
from_f16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) { /* infinity, or NaN, which becomes quiet */
        const uint32_t quiet = rest > 0x7c00u << 13 ? 0x400000 : 0;
        return float_of(sign | 0x7f800000 | rest | quiet);
    }
    if (rest < 0x400u << 13) { /* subnormal: a multiple of 2^-24, exact in float */
        const float magnitude = (float)(half & 0x3ff) * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | (rest + F16_REBIAS));
}

static inline uint16_t
to_f16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t rest = bits & 0x7fffffff;
    uint32_t half;
    if (rest > 0x7f800000) { /* quiet, with the upper part of the payload, as the processors do */
        half = 0x7e00 | (rest >> 13 & 0x3ff);
    }
    else if (rest >= F16_OVERFLOW) {
        half = 0x7c00;
    }
    else if (rest < F16_SMALLEST_NORMAL) {
        /* One unit of 0.5f's last place is 2^-24, a subnormal half's unit: the addition rounds for us. */
        half = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    }
    else {
        half = (rest - F16_REBIAS + 0xfff + (rest >> 13 & 1)) >> 13;
    }
    return (uint16_t)(sign | half);
}

/* ---- The template's block: one float ---- */

#define VEC_TARGET
#define VEC_WIDTH 1
#define VEC_STREAM_ALIGN 0

typedef float vec;

static inline vec
vec_load(mp_dtype dtype, const char *p)
{
    double f64;
    float f32;
    uint16_t half;
    switch (dtype) {
    case MP_F64:
        memcpy(&f64, p, sizeof f64);
        return (float)f64;
    case MP_F32:
        memcpy(&f32, p, sizeof f32);
        return f32;
    case MP_BF16:
        memcpy(&half, p, sizeof half);
        return from_bf16(half);
    default:
        memcpy(&half, p, sizeof half);
        return from_f16(half);
    }
}

static inline void
vec_store(mp_dtype dtype, char *p, vec v, uint32_t nan, int stream)
{
    (void)stream;
    double f64;
    uint16_t half;
    switch (dtype) {
    case MP_F64:
        f64 = (double)v;
        memcpy(p, &f64, sizeof f64);
        break;
    case MP_F32:
        memcpy(p, &v, sizeof v);
        break;
    case MP_BF16:
        half = to_bf16(v, nan);
        memcpy(p, &half, sizeof half);
        break;
    default:
        half = to_f16(v);
        memcpy(p, &half, sizeof half);
        break;
    }
}

static inline vec
vec_set1(float value)
{
    return value;
}

static inline vec
vec_add(vec a, vec b)
{
    return a + b;
}

static inline vec
vec_mul(vec a, vec b)
{
    return a * b;
}

static inline vec
vec_div(vec a, vec b)
{
    return a / b;
}

#include "host/convert_loop.h"

static int
usable(void)
{
    return 1;
}

const mp_cast_isa mp_cast_scalar = {.name = "scalar", .usable = usable, VEC_TABLE};
