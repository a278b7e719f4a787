/* Kernels for AVX-512 (F, BW, VL, DQ: every server since Skylake): 32 elements a block, in two registers.
 *
 * AVX512_BF16's vcvtneps2bf16 is not used: it takes subnormals for zero, which Tensor.to does not. */
#if defined(__x86_64__)

#include <immintrin.h>

#include "host/convert_kernel.h"

#define VEC_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define VEC_WIDTH 32
#define VEC_STREAM_ALIGN 64
#define AVX512 VEC_TARGET static inline __attribute__((always_inline))

typedef struct vec {
    __m512 lo, hi;
} vec;

/* ---- Sixteen elements ---- */

AVX512 __m512
load_f64(const char *p)
{
    const __m256 lo = _mm512_cvtpd_ps(_mm512_loadu_pd(p));
    const __m256 hi = _mm512_cvtpd_ps(_mm512_loadu_pd(p + 64));
    return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
}

AVX512 __m512
load_bf16(const char *p)
{
    const __m256i halves = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

AVX512 __m512
load_f16(const char *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* Round to nearest even as host/convert_scalar.c explains; leaves the bfloat16 in the upper half of each 32 bits. */
AVX512 __m512i
round_bf16(__m512 v, uint32_t nan)
{
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i parity = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(parity, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32((int)(nan << 16)));
}

/* The upper halves of both registers' 32-bit elements, in order: one permutation instead of two narrowings. */
AVX512 __m512i
upper_halves(__m512i lo, __m512i hi)
{
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(lo, odd, hi);
}

AVX512 void
put(char *p, __m512i v, int stream)
{
    if (stream) {
        _mm512_stream_si512((__m512i *)p, v);
    }
    else {
        _mm512_storeu_si512(p, v);
    }
}

AVX512 void
store_f64(char *p, __m512 v, int stream)
{
    put(p, _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_castps512_ps256(v))), stream);
    put(p + 64, _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))), stream);
}

/* All lanes, by the masked form: without optimisation gcc's macro for the plain one trips -Wsign-conversion. */
AVX512 __m256i
round_f16(__m512 v)
{
    return _mm512_maskz_cvtps_ph((__mmask16)0xffff, v, _MM_FROUND_TO_NEAREST_INT);
}

/* ---- The template's block ---- */

AVX512 vec
vec_load(mp_dtype dtype, const char *p)
{
    switch (dtype) {
    case MP_F64:
        return (vec){load_f64(p), load_f64(p + 128)};
    case MP_F32:
        return (vec){_mm512_loadu_ps(p), _mm512_loadu_ps(p + 64)};
    case MP_BF16:
        return (vec){load_bf16(p), load_bf16(p + 32)};
    default:
        return (vec){load_f16(p), load_f16(p + 32)};
    }
}

AVX512 void
vec_store(mp_dtype dtype, char *p, vec v, uint32_t nan, int stream)
{
    switch (dtype) {
    case MP_F64:
        store_f64(p, v.lo, stream);
        store_f64(p + 128, v.hi, stream);
        break;
    case MP_F32:
        put(p, _mm512_castps_si512(v.lo), stream);
        put(p + 64, _mm512_castps_si512(v.hi), stream);
        break;
    case MP_BF16:
        put(p, upper_halves(round_bf16(v.lo, nan), round_bf16(v.hi, nan)), stream);
        break;
    default:
        put(p, _mm512_inserti64x4(_mm512_castsi256_si512(round_f16(v.lo)), round_f16(v.hi), 1), stream);
        break;
    }
}

AVX512 vec
vec_set1(float value)
{
    return (vec){_mm512_set1_ps(value), _mm512_set1_ps(value)};
}

AVX512 vec
vec_add(vec a, vec b)
{
    return (vec){_mm512_add_ps(a.lo, b.lo), _mm512_add_ps(a.hi, b.hi)};
}

AVX512 vec
vec_mul(vec a, vec b)
{
    return (vec){_mm512_mul_ps(a.lo, b.lo), _mm512_mul_ps(a.hi, b.hi)};
}

AVX512 vec
vec_div(vec a, vec b)
{
    return (vec){_mm512_div_ps(a.lo, b.lo), _mm512_div_ps(a.hi, b.hi)};
}

AVX512 void
vec_fence(void)
{
    _mm_sfence();
}

#include "host/convert_loop.h"

static int
usable(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

const mp_cast_isa mp_cast_avx512 = {.name = "avx512", .usable = usable, VEC_TABLE};

#endif
