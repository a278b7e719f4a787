/* Kernels for AVX2 with F16C: 16 elements a block, in two registers. */
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "host/convert_kernel.h"

#define VEC_TARGET __attribute__((target("avx2,f16c")))
#define VEC_WIDTH 16
#define VEC_STREAM_ALIGN 32
#define AVX2 VEC_TARGET static inline __attribute__((always_inline))

typedef struct vec {
    __m256 lo, hi;
} vec;

/* ---- Eight elements ---- */

AVX2 __m256
load_f64(const char *p)
{
    const __m128 lo = _mm256_cvtpd_ps(_mm256_loadu_pd((const double *)p));
    const __m128 hi = _mm256_cvtpd_ps(_mm256_loadu_pd((const double *)p + 4));
    return _mm256_set_m128(hi, lo);
}

AVX2 __m256
load_bf16(const char *p)
{
    const __m128i halves = _mm_loadu_si128((const __m128i *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

AVX2 __m256
load_f16(const char *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* Round to nearest even as host/convert_scalar.c explains; leaves the bfloat16 in the lower half of each 32 bits. */
AVX2 __m256i
round_bf16(__m256 v, uint32_t nan)
{
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i parity = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(parity, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i nans = _mm256_set1_epi32((int)(nan << 16));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nans, is_nan), 16);
}

AVX2 void
put(char *p, __m256i v, int stream)
{
    if (stream) {
        _mm256_stream_si256((__m256i *)p, v);
    }
    else {
        _mm256_storeu_si256((__m256i *)p, v);
    }
}

AVX2 void
store_f64(char *p, __m256 v, int stream)
{
    put(p, _mm256_castpd_si256(_mm256_cvtps_pd(_mm256_castps256_ps128(v))), stream);
    put(p + 32, _mm256_castpd_si256(_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))), stream);
}

/* ---- The template's block ---- */

AVX2 vec
vec_load(mp_dtype dtype, const char *p)
{
    switch (dtype) {
    case MP_F64:
        return (vec){load_f64(p), load_f64(p + 64)};
    case MP_F32:
        return (vec){_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)p + 8)};
    case MP_BF16:
        return (vec){load_bf16(p), load_bf16(p + 16)};
    default:
        return (vec){load_f16(p), load_f16(p + 16)};
    }
}

AVX2 void
vec_store(mp_dtype dtype, char *p, vec v, uint32_t nan, int stream)
{
    __m256i packed;
    switch (dtype) {
    case MP_F64:
        store_f64(p, v.lo, stream);
        store_f64(p + 64, v.hi, stream);
        break;
    case MP_F32:
        put(p, _mm256_castps_si256(v.lo), stream);
        put(p + 32, _mm256_castps_si256(v.hi), stream);
        break;
    case MP_BF16:
        /* Packing works within 128-bit lanes; the permutation puts the quarters in order. */
        packed = _mm256_packus_epi32(round_bf16(v.lo, nan), round_bf16(v.hi, nan));
        put(p, _mm256_permute4x64_epi64(packed, 0xd8), stream);
        break;
    default:
        packed = _mm256_set_m128i(_mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
        put(p, packed, stream);
        break;
    }
}

AVX2 vec
vec_set1(float value)
{
    return (vec){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

AVX2 vec
vec_add(vec a, vec b)
{
    return (vec){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

AVX2 vec
vec_mul(vec a, vec b)
{
    return (vec){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

AVX2 vec
vec_div(vec a, vec b)
{
    return (vec){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

AVX2 void
vec_fence(void)
{
    _mm_sfence();
}

#include "host/convert_loop.h"

/* The builtin also asks whether the system saves the wide registers.  Compilers before gcc 11 do not know "f16c"
 * there, so that bit is read by hand. */
static int
usable(void)
{
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const mp_cast_isa mp_cast_avx2 = {.name = "avx2", .usable = usable, VEC_TABLE};

#endif
