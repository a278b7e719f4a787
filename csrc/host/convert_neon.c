/* Kernels for AArch64, whose base instruction set converts float16 and float64: 8 elements a block.
 *
 * No non-temporal stores: STNP is a hint that no compiler intrinsic gives. */
#if defined(__aarch64__)

#include <arm_neon.h>

#include "host/convert_kernel.h"

#define VEC_TARGET
#define VEC_WIDTH 8
#define VEC_STREAM_ALIGN 0
#define NEON static inline __attribute__((always_inline))

typedef struct vec {
    float32x4_t lo, hi;
} vec;

/* ---- Four elements ---- */

NEON float32x4_t
load_f64(const char *p)
{
    const float32x2_t lo = vcvt_f32_f64(vld1q_f64((const double *)p));
    return vcvt_high_f32_f64(lo, vld1q_f64((const double *)p + 2));
}

NEON float32x4_t
widen_bf16(uint16x4_t halves)
{
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

/* Round to nearest even as host/convert_scalar.c explains; the narrowing shift takes the upper half of each 32 bits. */
NEON uint16x4_t
round_bf16(float32x4_t v, uint32_t nan)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t parity = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(parity, vdupq_n_u32(0x7fff)));
    const uint32x4_t is_number = vceqq_f32(v, v);
    return vshrn_n_u32(vbslq_u32(is_number, rounded, vdupq_n_u32(nan << 16)), 16);
}

NEON void
store_f64(char *p, float32x4_t v)
{
    vst1q_f64((double *)p, vcvt_f64_f32(vget_low_f32(v)));
    vst1q_f64((double *)p + 2, vcvt_high_f64_f32(v));
}

/* ---- The template's block ---- */

NEON vec
vec_load(mp_dtype dtype, const char *p)
{
    uint16x8_t halves;
    switch (dtype) {
    case MP_F64:
        return (vec){load_f64(p), load_f64(p + 32)};
    case MP_F32:
        return (vec){vld1q_f32((const float *)p), vld1q_f32((const float *)p + 4)};
    case MP_BF16:
        halves = vld1q_u16((const uint16_t *)p);
        return (vec){widen_bf16(vget_low_u16(halves)), widen_bf16(vget_high_u16(halves))};
    default:
        halves = vld1q_u16((const uint16_t *)p);
        return (vec){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves))),
                     vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves)))};
    }
}

NEON void
vec_store(mp_dtype dtype, char *p, vec v, uint32_t nan, int stream)
{
    (void)stream;
    switch (dtype) {
    case MP_F64:
        store_f64(p, v.lo);
        store_f64(p + 32, v.hi);
        break;
    case MP_F32:
        vst1q_f32((float *)p, v.lo);
        vst1q_f32((float *)p + 4, v.hi);
        break;
    case MP_BF16:
        vst1q_u16((uint16_t *)p, vcombine_u16(round_bf16(v.lo, nan), round_bf16(v.hi, nan)));
        break;
    default:
        vst1_u16((uint16_t *)p, vreinterpret_u16_f16(vcvt_f16_f32(v.lo)));
        vst1_u16((uint16_t *)p + 4, vreinterpret_u16_f16(vcvt_f16_f32(v.hi)));
        break;
    }
}

NEON vec
vec_set1(float value)
{
    return (vec){vdupq_n_f32(value), vdupq_n_f32(value)};
}

NEON vec
vec_add(vec a, vec b)
{
    return (vec){vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)};
}

NEON vec
vec_mul(vec a, vec b)
{
    return (vec){vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)};
}

NEON vec
vec_div(vec a, vec b)
{
    return (vec){vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)};
}

#include "host/convert_loop.h"

static int
usable(void)
{
    return 1; /* part of the base architecture */
}

const mp_cast_isa mp_cast_neon = {.name = "neon", .usable = usable, VEC_TABLE};

#endif
