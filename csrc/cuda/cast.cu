// The one kernel of the product: the formula of csrc/core/row.h over a list of rows, in one launch.
//
//     dst[i] = to_dst((wide(src[i]) + wide(add[i])) / divisor)
//
// The rows are an argument of the kernel.  The driver copies arguments when it takes a launch, so that a list needs no
// memory on the device, no upload and nobody who knows when it is not read any more; a captured graph keeps its own copy.
//
// Work is cut into chunks of 2^shift elements of one row; a warp takes whole chunks, so that rows of any mix of types run
// side by side and small rows share a block (a bias takes one warp for a moment, not a block).  The grid is persistent:
// the host chooses its size from the device, not from the work.
//
// Rows are cut where the destination is aligned to 16 bytes: the first chunk also takes the elements before that (the
// head), the last one those after the last whole group (the tail).  In between every access moves a whole group of
// MP_GROUP elements, where the source lies right; a source that is misaligned differently is read element by element and
// costs no correctness.
//
// The same text is compiled by nvcc at build time and by NVRTC at run time: no header is needed.  No shuffles, votes,
// shared memory, barriers or calls: lanes share nothing, and the tests can execute the PTX of this file.

// ---- What may be chosen ---------------------------------------------------------------------------------------------
// For a benchmark, which may define these otherwise (NVCC_APPEND_FLAGS=-DMP_GROUP=8).  csrc/cuda/launch.h has those of
// the host.

// Consecutive elements that a lane takes at a time.  4: a warp reads or writes 512 bytes of float32 without a gap, in one
// instruction.  8: 16-bit types move 16 bytes at a time instead of 8, but float32 two times 16, each of which uses half of
// every sector of 32 bytes that it touches.
#ifndef MP_GROUP
#define MP_GROUP 4
#endif

// Bytes that a lane loads before it uses the first of them: bytes in flight make the bandwidth.
#ifndef MP_IN_FLIGHT
#define MP_IN_FLIGHT 64
#endif

// 1: a warp takes chunks that follow one another, and seldom has to look for a row.  0: the chunks that all warps take at
// one time follow one another.
#ifndef MP_IN_SEQUENCE
#define MP_IN_SEQUENCE 1
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// mp_dtype of csrc/core/dtype.h; MP_NONE marks an operand that is not there.
enum { MP_F64 = 0, MP_F32 = 1, MP_BF16 = 2, MP_F16 = 3, MP_NONE = 255 };

// How the sum is scaled.  A power of two is multiplied by its exact reciprocal: the same bits, without a division.
enum { MP_KEEP = 0, MP_MULTIPLY = 1, MP_DIVIDE = 2 };

// One row, as csrc/cuda/launch.c lays it out (kernel_row; the sizes are checked there).  Empty rows never get here.
struct mp_krow {
    u64 src;
    u64 add;
    u64 dst;
    i64 numel;
    u32 first_chunk;  // chunks of all rows before this one
    u32 types;        // src | add << 8 | dst << 16
};

// All the rows of a launch: csrc/cuda/launch.h says why so many (MP_CUDA_ROWS).
struct mp_rows {
    mp_krow row[101];
};

static_assert(sizeof(mp_krow) == 40 && sizeof(mp_rows) == 4040, "csrc/cuda/launch.c has the same layout");

// ---- What differs between compilers ---------------------------------------------------------------------------------
// Conversions round to nearest, ties to even; subnormals are kept, NaN stays NaN, overflow gives infinity.
//
// Loads and stores say "global", which the compiler cannot know of an address that it reads from a row.  They are
// volatile to stay in the order written: all loads of a step before its first store.  Not the read-only path, since a
// row's source may be its destination, and no cache hints: with groups of eight, the halves of a lane's floats share a
// sector, which "no allocate" would fetch twice.

#ifndef MP_HOST_SHIM  // a test compiles this file for the host and brings this section of its own

#define MP_INLINE static __device__ __forceinline__
#define MP_ARGUMENT const __grid_constant__  // indexed where it lies: no copy in local memory

MP_INLINE uint4 load_b128(u64 address)
{
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

MP_INLINE uint2 load_pair(u64 address)
{
    uint2 value;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address));
    return value;
}

MP_INLINE u64 load_b64(u64 address)
{
    u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
    return value;
}

MP_INLINE u32 load_b32(u64 address)
{
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}

MP_INLINE u32 load_b16(u64 address)
{
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(address));
    return value;
}

MP_INLINE void store_b128(u64 address, u32 a, u32 b, u32 c, u32 d)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a), "r"(b), "r"(c), "r"(d));
}

MP_INLINE void store_pair(u64 address, u32 a, u32 b)
{
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(a), "r"(b));
}

MP_INLINE void store_b64(u64 address, u64 value)
{
    asm volatile("st.global.u64 [%0], %1;" ::"l"(address), "l"(value));
}

MP_INLINE void store_b32(u64 address, u32 value)
{
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value));
}

MP_INLINE void store_b16(u64 address, u32 value)
{
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"((u16)value));
}

MP_INLINE float float_of_f16(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

MP_INLINE u32 f16_bits(float value)
{
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#if __CUDA_ARCH__ >= 800
MP_INLINE u32 bf16_bits(float value)
{
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

MP_INLINE u32 bf16_pair(float low, float high)
{
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

MP_INLINE u32 f16_pair(float low, float high)
{
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#else
// No such instructions before sm_80.  NaN is told apart first: the rounding bias would carry its payload into the
// exponent or the sign.  0x7fff is what the instruction gives.
MP_INLINE u32 bf16_bits(float value)
{
    const u32 bits = __float_as_uint(value);
    const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded;
}

MP_INLINE u32 bf16_pair(float low, float high)
{
    return bf16_bits(low) | bf16_bits(high) << 16;
}

MP_INLINE u32 f16_pair(float low, float high)
{
    return f16_bits(low) | f16_bits(high) << 16;
}
#endif
#endif

// ---- A row as a warp sees it ----------------------------------------------------------------------------------------

struct operation {
    u64 src, add, dst;
    u32 src_type, add_type, dst_type;
    bool src_aligned, add_aligned;  // to what one access moves, where the destination is
    bool copy;                      // same type, nothing to compute: the bits are moved, payloads of NaN included
    u32 scaling;
    float factor;  // the divisor or its reciprocal
};

MP_INLINE u64 bytes_of(i64 count, u32 type)
{
    return (u64)count << (type == MP_F64 ? 3 : type == MP_F32 ? 2 : 1);
}

MP_INLINE float scaled(float value, const operation &op)
{
    return op.scaling == MP_KEEP       ? value
           : op.scaling == MP_MULTIPLY ? __fmul_rn(value, op.factor)
                                       : __fdiv_rn(value, op.factor);
}

// ---- One element ----------------------------------------------------------------------------------------------------

MP_INLINE float load_float(u64 address, u32 type)
{
    if (type == MP_F32) {
        return __uint_as_float(load_b32(address));
    }
    const u32 bits = load_b16(address);
    return type == MP_BF16 ? __uint_as_float(bits << 16) : float_of_f16(bits);
}

MP_INLINE void store_float(u64 address, u32 type, float value)
{
    if (type == MP_F32) {
        store_b32(address, __float_as_uint(value));
    }
    else {
        store_b16(address, type == MP_BF16 ? bf16_bits(value) : f16_bits(value));
    }
}

MP_INLINE double load_double(u64 address, u32 type)
{
    return type == MP_F64 ? __longlong_as_double((i64)load_b64(address)) : (double)load_float(address, type);
}

MP_INLINE void one_float(const operation &op, i64 i)
{
    const u64 target = op.dst + bytes_of(i, op.dst_type);
    if (op.copy && op.dst_type != MP_F32) {
        store_b16(target, load_b16(op.src + bytes_of(i, op.src_type)));
        return;
    }
    float value = op.src_type == MP_NONE ? 0.0f : load_float(op.src + bytes_of(i, op.src_type), op.src_type);
    if (op.add_type != MP_NONE) {
        value = __fadd_rn(value, load_float(op.add + bytes_of(i, op.add_type), op.add_type));
    }
    store_float(target, op.dst_type, scaled(value, op));
}

// A double becomes a 16-bit type by way of float, as in PyTorch.
MP_INLINE void one_double(const operation &op, double factor, i64 i)
{
    const u64 target = op.dst + bytes_of(i, op.dst_type);
    double value = op.src_type == MP_NONE ? 0.0 : load_double(op.src + bytes_of(i, op.src_type), op.src_type);
    if (op.add_type != MP_NONE) {
        value = __dadd_rn(value, load_double(op.add + bytes_of(i, op.add_type), op.add_type));
    }
    if (op.scaling != MP_KEEP) {
        value = op.scaling == MP_MULTIPLY ? __dmul_rn(value, factor) : __ddiv_rn(value, factor);
    }
    if (op.dst_type == MP_F64) {
        store_b64(target, (u64)__double_as_longlong(value));
    }
    else {
        store_float(target, op.dst_type, (float)value);
    }
}

// ---- A group of MP_GROUP elements: one access, or two of 16 bytes ---------------------------------------------------

// Words of a group of float32, and of one of 16-bit elements, two in a word.
constexpr int WIDE = MP_GROUP, NARROW = MP_GROUP / 2;
static_assert(MP_GROUP == 4 || MP_GROUP == 8, "accesses of 8 or 16 bytes");

// From one group of a lane to its next.
constexpr i64 STEP = 32 * MP_GROUP;

// As it lies in memory.
template <int WORDS>
struct group {
    u32 word[WORDS];
};

template <int WORDS>
MP_INLINE void load_group(group<WORDS> &out, u64 address, bool aligned)
{
    if (!aligned) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            out.word[k] = WORDS == WIDE ? load_b32(address + 4 * k)
                                        : load_b16(address + 4 * k) | load_b16(address + 4 * k + 2) << 16;
        }
    }
    else if constexpr (WORDS == 2) {
        const uint2 pair = load_pair(address);
        out.word[0] = pair.x;
        out.word[1] = pair.y;
    }
    else {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            const uint4 quad = load_b128(address + 4 * k);
            out.word[k] = quad.x;
            out.word[k + 1] = quad.y;
            out.word[k + 2] = quad.z;
            out.word[k + 3] = quad.w;
        }
    }
}

template <int WORDS>
MP_INLINE void store_words(u64 address, const u32 (&word)[WORDS])
{
    if constexpr (WORDS == 2) {
        store_pair(address, word[0], word[1]);
    }
    else {
#pragma unroll
        for (int k = 0; k < WORDS; k += 4) {
            store_b128(address + 4 * k, word[k], word[k + 1], word[k + 2], word[k + 3]);
        }
    }
}

MP_INLINE void widen(float (&out)[MP_GROUP], const group<WIDE> &in, u32)
{
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        out[k] = __uint_as_float(in.word[k]);
    }
}

MP_INLINE void widen(float (&out)[MP_GROUP], const group<NARROW> &in, u32 type)
{
    if (type == MP_BF16) {
#pragma unroll
        for (int k = 0; k < NARROW; k++) {
            out[2 * k] = __uint_as_float(in.word[k] << 16);
            out[2 * k + 1] = __uint_as_float(in.word[k] & 0xffff0000u);
        }
    }
    else {
#pragma unroll
        for (int k = 0; k < NARROW; k++) {
            out[2 * k] = float_of_f16(in.word[k] & 0xffffu);
            out[2 * k + 1] = float_of_f16(in.word[k] >> 16);
        }
    }
}

// The same for operands whose type is known only at run time.
MP_INLINE void load_any(group<WIDE> &out, u64 address, u32 type, bool aligned)
{
    if (type == MP_F32) {
        load_group(out, address, aligned);
    }
    else {
        group<NARROW> half;
        load_group(half, address, aligned);
#pragma unroll
        for (int k = 0; k < NARROW; k++) {
            out.word[k] = half.word[k];
        }
    }
}

MP_INLINE void widen_any(float (&out)[MP_GROUP], const group<WIDE> &in, u32 type)
{
    if (type == MP_F32) {
        widen(out, in, type);
    }
    else {
        group<NARROW> half;
#pragma unroll
        for (int k = 0; k < NARROW; k++) {
            half.word[k] = in.word[k];
        }
        widen(out, half, type);
    }
}

// Scales, rounds and stores.  The destination is aligned.
MP_INLINE void finish(const operation &op, float (&value)[MP_GROUP], i64 i)
{
    const u64 target = op.dst + bytes_of(i, op.dst_type);
    if (op.scaling != MP_KEEP) {
#pragma unroll
        for (int k = 0; k < MP_GROUP; k++) {
            value[k] = scaled(value[k], op);
        }
    }
    u32 word[WIDE];
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        word[k] = __float_as_uint(value[k]);
    }
    if (op.dst_type == MP_F32) {
        store_words(target, word);
        return;
    }
    u32 pair[NARROW];
#pragma unroll
    for (int k = 0; k < NARROW; k++) {
        pair[k] = op.dst_type == MP_BF16 ? bf16_pair(value[2 * k], value[2 * k + 1])
                                         : f16_pair(value[2 * k], value[2 * k + 1]);
    }
    store_words(target, pair);
}

// N groups from one source, from element i on.  All loads are issued before the first result is used.
template <int WORDS, int N>
MP_INLINE void convert(const operation &op, i64 i)
{
    group<WORDS> raw[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        load_group(raw[n], op.src + bytes_of(i + STEP * n, op.src_type), op.src_aligned);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (op.copy) {
            store_words(op.dst + bytes_of(i + STEP * n, op.dst_type), raw[n].word);
        }
        else {
            float value[MP_GROUP];
            widen(value, raw[n], op.src_type);
            finish(op, value, i + STEP * n);
        }
    }
}

// N groups with an addend, or without a source.  All operands are loaded before the first is used.
template <int N>
MP_INLINE void combine(const operation &op, i64 i)
{
    group<WIDE> src[N] = {}, add[N] = {};
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (op.src_type != MP_NONE) {
            load_any(src[n], op.src + bytes_of(i + STEP * n, op.src_type), op.src_type, op.src_aligned);
        }
        if (op.add_type != MP_NONE) {
            load_any(add[n], op.add + bytes_of(i + STEP * n, op.add_type), op.add_type, op.add_aligned);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float value[MP_GROUP] = {};
        if (op.src_type != MP_NONE) {
            widen_any(value, src[n], op.src_type);
        }
        if (op.add_type != MP_NONE) {
            float term[MP_GROUP];
            widen_any(term, add[n], op.add_type);
#pragma unroll
            for (int k = 0; k < MP_GROUP; k++) {
                value[k] = __fadd_rn(value[k], term[k]);
            }
        }
        finish(op, value, i + STEP * n);
    }
}

// ---- A chunk of a row -----------------------------------------------------------------------------------------------

// Elements [begin, end) by one warp; `body` is where the destination is first aligned to 16 bytes.
MP_INLINE void run_float(const operation &op, i64 begin, i64 body, i64 end, u32 lane)
{
    // Groups in flight: of float32, of 16-bit elements, of pairs of operands.
    constexpr int wide = MP_IN_FLIGHT / (4 * WIDE), narrow = MP_IN_FLIGHT / (4 * NARROW), both = wide / 2;
    const i64 tail = body + ((end - body) & ~(i64)(MP_GROUP - 1));
    i64 i = body + lane * MP_GROUP;
    if (op.src_type == MP_NONE || op.add_type != MP_NONE) {
        for (; i + STEP * (both - 1) < tail; i += STEP * both) {
            combine<both>(op, i);
        }
        for (; both > 1 && i < tail; i += STEP) {
            combine<1>(op, i);
        }
    }
    else if (op.src_type == MP_F32) {
        for (; i + STEP * (wide - 1) < tail; i += STEP * wide) {
            convert<WIDE, wide>(op, i);
        }
        for (; i < tail; i += STEP) {
            convert<WIDE, 1>(op, i);
        }
    }
    else {
        for (; i + STEP * (narrow - 1) < tail; i += STEP * narrow) {
            convert<NARROW, narrow>(op, i);
        }
        for (; i < tail; i += STEP) {
            convert<NARROW, 1>(op, i);
        }
    }
    // Head and tail have at most seven elements each: one step of the warp does both.
    const i64 heads = body - begin;
    if (lane < heads + (end - tail)) {
        one_float(op, lane < heads ? begin + lane : tail + (lane - heads));
    }
}

// Rows with float64 in them are rare: one element a lane.
MP_INLINE void run_double(const operation &op, double factor, i64 begin, i64 end, u32 lane)
{
    for (i64 i = begin + lane; i < end; i += 32) {
        one_double(op, factor, i);
    }
}

// Elements of the row before its destination is aligned to 16 bytes.  The host counts chunks by the same rule.
MP_INLINE i64 head_of(const mp_krow &row, u32 dst_type)
{
    const u32 bytes = (16u - (u32)(row.dst & 15u)) & 15u;
    const i64 head = bytes >> (dst_type == MP_F64 ? 3 : dst_type == MP_F32 ? 2 : 1);
    return head < row.numel ? head : row.numel;
}

// Whether every group of an operand can be moved whole: a pair of words, or 16 bytes.
MP_INLINE bool aligned(u64 address, u32 type)
{
    return (address & (type == MP_F32 || MP_GROUP == 8 ? 15u : 7u)) == 0;
}

MP_INLINE void run_chunk(const mp_krow &row, u32 chunk, u32 shift, u32 scaling, double factor, u32 lane)
{
    operation op;
    op.src = row.src;
    op.add = row.add;
    op.dst = row.dst;
    op.src_type = row.types & 255u;
    op.add_type = row.types >> 8 & 255u;
    op.dst_type = row.types >> 16 & 255u;
    op.scaling = scaling;
    op.factor = (float)factor;
    const i64 head = head_of(row, op.dst_type);
    op.src_aligned = aligned(op.src + bytes_of(head, op.src_type), op.src_type);
    op.add_aligned = aligned(op.add + bytes_of(head, op.add_type), op.add_type);
    op.copy = op.src_type == op.dst_type && op.add_type == MP_NONE && scaling == MP_KEEP;

    const i64 body = head + ((i64)chunk << shift);
    const i64 begin = chunk == 0 ? 0 : body;
    const i64 full = body + ((i64)1 << shift);
    const i64 end = full < row.numel ? full : row.numel;
    if (op.src_type == MP_F64 || op.add_type == MP_F64 || op.dst_type == MP_F64) {
        run_double(op, factor, begin, end, lane);
    }
    else {
        run_float(op, begin, body, end, lane);
    }
}

// The last row in [low, count) whose first chunk is not after `chunk`.
MP_INLINE u32 find_row(const mp_rows &rows, u32 low, u32 count, u32 chunk)
{
    if (low + 1 == count || rows.row[low + 1].first_chunk > chunk) {
        return low;  // most often the row of the warp's previous chunk
    }
    u32 high = count - 1;
    while (low < high) {
        const u32 middle = low + (high - low + 1) / 2;
        if (rows.row[middle].first_chunk <= chunk) {
            low = middle;
        }
        else {
            high = middle - 1;
        }
    }
    return low;
}

// Blocks of 256 threads; at most 64 registers, so that four blocks keep 64 KiB of loads in flight on a multiprocessor,
// which is what the newest architectures want.
extern "C" __global__ void __launch_bounds__(256, 4)
mp_cast(MP_ARGUMENT mp_rows rows, u32 row_count, u32 shift, u32 chunks, u32 scaling, double factor)
{
    const u32 lane = threadIdx.x & 31u;
    const u32 warps_in_block = blockDim.x >> 5;
    const u32 warps = gridDim.x * warps_in_block;
    const u32 warp = blockIdx.x * warps_in_block + (threadIdx.x >> 5);
#if MP_IN_SEQUENCE
    // As many for every warp, and one more for the first ones.
    const u32 each = chunks / warps, more = chunks % warps, stride = 1;
    const u32 begin = warp * each + (warp < more ? warp : more);
    const u32 end = begin + each + (warp < more);
#else
    const u32 begin = warp, end = chunks, stride = warps;
#endif
    u32 row = 0;
    for (u32 chunk = begin; chunk < end; chunk += stride) {
        row = find_row(rows, row, row_count, chunk);
        const mp_krow here = rows.row[row];
        run_chunk(here, chunk - here.first_chunk, shift, scaling, factor, lane);
    }
}
