// Kernels for the simulator's own tests: between them, what nvcc makes of multi-tensor code.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

struct Row {
    const void *src;
    void *dst;
    unsigned long long numel;
};

constexpr unsigned kChunk = 1024;

template <class From, class To>
__device__ To convert(From x)
{
    return static_cast<To>(static_cast<float>(x));
}
template <>
__device__ float convert(double x)
{
    return static_cast<float>(x);
}
template <>
__device__ double convert(float x)
{
    return x;
}
template <>
__device__ __nv_bfloat16 convert(double x)
{
    return __double2bfloat16(x);
}
template <>
__device__ __half convert(double x)
{
    return __double2half(x);
}

// One block a chunk; rows are found by walking.  Vector accesses where both sides are aligned.
template <class From, class To>
__device__ void cast_rows(const Row *rows, int count)
{
    unsigned chunk = blockIdx.x;
    for (int r = 0; r < count; r++) {
        const Row row = rows[r];
        const unsigned chunks = static_cast<unsigned>((row.numel + kChunk - 1) / kChunk);
        for (; chunk < chunks; chunk += gridDim.x) {
            const auto *src = static_cast<const From *>(row.src) + static_cast<size_t>(chunk) * kChunk;
            auto *dst = static_cast<To *>(row.dst) + static_cast<size_t>(chunk) * kChunk;
            const unsigned n = min(kChunk, static_cast<unsigned>(row.numel - static_cast<size_t>(chunk) * kChunk));
            for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
                dst[i] = convert<From, To>(src[i]);
        }
        chunk -= chunks;
    }
}

#define CAST(from, from_name, to, to_name)                                                                           \
    extern "C" __global__ void cast_##from_name##_##to_name(const Row *rows, int count)                               \
    {                                                                                                                \
        cast_rows<from, to>(rows, count);                                                                             \
    }

CAST(float, f32, __nv_bfloat16, bf16)
CAST(float, f32, __half, f16)
CAST(float, f32, double, f64)
CAST(__nv_bfloat16, bf16, float, f32)
CAST(__half, f16, float, f32)
CAST(double, f64, float, f32)
CAST(double, f64, __nv_bfloat16, bf16)
CAST(double, f64, __half, f16)
CAST(__nv_bfloat16, bf16, __half, f16)
CAST(__half, f16, __nv_bfloat16, bf16)

// Eight elements at a time through packed conversions and 16-byte accesses; the caller guarantees alignment.
extern "C" __global__ void cast_f32_bf16_vector(const float4 *__restrict__ src, uint4 *__restrict__ dst, unsigned n)
{
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float4 a = __ldg(src + 2 * i), b = __ldg(src + 2 * i + 1);
        __nv_bfloat162 p[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w),
                               __floats2bfloat162_rn(b.x, b.y), __floats2bfloat162_rn(b.z, b.w)};
        dst[i] = *reinterpret_cast<uint4 *>(p);
    }
}

// dst = (dst + src) / divisor in float, and a flag when any result is not finite.
extern "C" __global__ void accumulate_f16(const __half *src, float *dst, unsigned n, float divisor, unsigned *found)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const float x = (dst[i] + __half2float(src[i])) / divisor;
    if (!isfinite(x))
        *found = 1;
    dst[i] = x;
}

// A table as a parameter, indexed at run time.
struct Table {
    const float *src[40];
    __nv_bfloat16 *dst[40];
    unsigned numel[40];
};

extern "C" __global__ void cast_by_value(const __grid_constant__ Table table, int count)
{
    for (int t = blockIdx.x; t < count; t += gridDim.x)
        for (unsigned i = threadIdx.x; i < table.numel[t]; i += blockDim.x)
            table.dst[t][i] = __float2bfloat16_rn(table.src[t][i]);
}

// The sum of a block through shared memory.  Without `barrier` the threads race.
template <bool barrier>
__device__ void block_sum(const float *src, float *dst, float *shared)
{
    shared[threadIdx.x] = src[blockIdx.x * blockDim.x + threadIdx.x];
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (barrier)
            __syncthreads();
        if (threadIdx.x < half)
            shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        dst[blockIdx.x] = shared[0];
}

extern "C" __global__ void sum_static(const float *src, float *dst)
{
    __shared__ float shared[256];
    block_sum<true>(src, dst, shared);
}

extern "C" __global__ void sum_dynamic(const float *src, float *dst)
{
    extern __shared__ float dynamic[];
    block_sum<true>(src, dst, dynamic);
}

extern "C" __global__ void sum_without_barrier(const float *src, float *dst)
{
    __shared__ float shared[256];
    block_sum<false>(src, dst, shared);
}

// A dense switch (a branch table), a local array indexed at run time, a constant table, and atomics.
__constant__ unsigned weights[8] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000};

extern "C" __global__ void control_flow(const unsigned *src, unsigned *dst, unsigned *total, unsigned n)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const unsigned x = src[i];
    unsigned digits[8];
    for (int k = 0; k < 8; k++)
        digits[k] = x >> (4 * k) & 15;
    unsigned y;
    switch (x % 9) {
    case 0: y = digits[x & 7]; break;
    case 1: y = x * 3; break;
    case 2: y = __popc(x); break;
    case 3: y = __clz(x); break;
    case 4: y = __brev(x); break;
    case 5: y = x / (i + 1); break;
    case 6: y = weights[x & 7]; break;
    case 7: y = __umulhi(x, 0x9e3779b9u); break;
    default: y = min(x, 77u) + max(x, 5u); break;
    }
    dst[i] = y;
    atomicAdd(total, y);
}
