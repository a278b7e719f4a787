/* The loops of one instruction set, written once: a template, not a header.  cast_<isa>.c includes it after it has
 * defined how a block of VEC_WIDTH elements is held, loaded and stored:
 *
 *     VEC_TARGET        attribute that turns the instruction set on, or nothing
 *     VEC_WIDTH         elements in a block
 *     VEC_STREAM_ALIGN  bytes that non-temporal stores must be aligned to; 0: there are none
 *     vec               a block, held as floats
 *     vec vec_load(mp_dtype, const char *)
 *     void vec_store(mp_dtype, char *, vec, uint32_t nan, int stream)    nan: the NaN of bfloat16
 *     vec vec_set1(float), vec_add(vec, vec), vec_mul(vec, vec), vec_div(vec, vec)
 *     void vec_fence(void)                                               orders non-temporal stores
 *
 * Holding every type as float loses nothing: float represents both halves exactly, and PyTorch too rounds float64
 * to float before it rounds to a half.  The types are constants wherever these functions are inlined, so the
 * switches in vec_load and vec_store vanish.
 *
 * It defines cast_<S>_<D>, stream_<S>_<D>, fuse_same_<S>_<D>, fuse_f32_<S>_<D>, and VEC_TABLE, the entries of the
 * mp_cast_isa that lists them.  A fuse kernel exists where no type is float64; mp_fuse_generic does the others.
 */
#define VEC_INLINE VEC_TARGET static inline __attribute__((always_inline))

/* ---- Casts ---- */

VEC_INLINE void
cast_block(mp_dtype from, mp_dtype to, const char *src, char *dst, int stream)
{
    vec_store(to, dst, vec_load(from, src), from == MP_F16 ? MP_BF16_NAN_FROM_F16 : MP_BF16_NAN, stream);
}

/* Heads and tails, n < VEC_WIDTH, pass through a block of their own: the same instructions convert them, and
 * nothing outside the arrays is touched. */
VEC_INLINE void
cast_edge(mp_dtype from, mp_dtype to, const char *src, char *dst, size_t n)
{
    char in[VEC_WIDTH * sizeof(double)] = {0};
    char out[VEC_WIDTH * sizeof(double)];
    memcpy(in, src, n * mp_dtype_size(from));
    cast_block(from, to, in, out, 0);
    memcpy(dst, out, n * mp_dtype_size(to));
}

VEC_INLINE void
cast_blocks(mp_dtype from, mp_dtype to, const char *src, char *dst, size_t n, int stream)
{
    const size_t src_size = mp_dtype_size(from), dst_size = mp_dtype_size(to);
    size_t i = 0;
    for (; n - i >= VEC_WIDTH; i += VEC_WIDTH) {
        cast_block(from, to, src + i * src_size, dst + i * dst_size, stream);
    }
    if (i < n) {
        cast_edge(from, to, src + i * src_size, dst + i * dst_size, n - i);
    }
}

#if VEC_STREAM_ALIGN
VEC_INLINE void
stream_blocks(mp_dtype from, mp_dtype to, const char *src, char *dst, size_t n)
{
    const size_t dst_size = mp_dtype_size(to);
    size_t head = (0 - (uintptr_t)dst) % VEC_STREAM_ALIGN / dst_size;
    head = head < n ? head : n;
    cast_edge(from, to, src, dst, head);
    cast_blocks(from, to, src + head * mp_dtype_size(from), dst + head * dst_size, n - head, 1);
    vec_fence(); /* the event that follows must not be seen before the data */
}
#endif

/* ---- Fused add and divide ---- */

VEC_INLINE void
fuse_block(mp_dtype from, mp_dtype with, mp_dtype to, const char *src, const char *add, char *dst, mp_scale scale)
{
    const vec factor = vec_set1(scale.factor);
    vec v = src != NULL ? vec_load(from, src) : vec_set1(0.0f);
    if (add != NULL) {
        v = vec_add(v, vec_load(with, add));
    }
    v = scale.divide ? vec_div(v, factor) : vec_mul(v, factor);
    vec_store(to, dst, v, MP_BF16_NAN, 0);
}

VEC_INLINE void
fuse_edge(mp_dtype from, mp_dtype with, mp_dtype to, const char *src, const char *add, char *dst, size_t n,
          mp_scale scale)
{
    char a[VEC_WIDTH * sizeof(float)] = {0}, b[VEC_WIDTH * sizeof(float)] = {0};
    char out[VEC_WIDTH * sizeof(float)];
    if (src != NULL) {
        memcpy(a, src, n * mp_dtype_size(from));
    }
    if (add != NULL) {
        memcpy(b, add, n * mp_dtype_size(with));
    }
    fuse_block(from, with, to, src != NULL ? a : NULL, add != NULL ? b : NULL, out, scale);
    memcpy(dst, out, n * mp_dtype_size(to));
}

VEC_INLINE void
fuse_blocks(mp_dtype from, mp_dtype with, mp_dtype to, const char *src, const char *add, char *dst, size_t n,
            double divisor)
{
    const mp_scale scale = mp_scale_of(divisor);
    for (; n >= VEC_WIDTH; n -= VEC_WIDTH) {
        fuse_block(from, with, to, src, add, dst, scale);
        src = src != NULL ? src + VEC_WIDTH * mp_dtype_size(from) : NULL;
        add = add != NULL ? add + VEC_WIDTH * mp_dtype_size(with) : NULL;
        dst += VEC_WIDTH * mp_dtype_size(to);
    }
    if (n > 0) {
        fuse_edge(from, with, to, src, add, dst, n, scale);
    }
}

/* ---- Instances ---- */

/* Equal types: bits, not values, so that even a signalling NaN arrives as it was. */
#define VEC_COPY(T)                                                                                                  \
    static void cast_##T##_##T(const void *src, void *dst, size_t n)                                                 \
    {                                                                                                                \
        memmove(dst, src, n * mp_dtype_size(MP_##T));                                                                \
    }
#define VEC_CAST(S, D)                                                                                               \
    VEC_TARGET static void cast_##S##_##D(const void *src, void *dst, size_t n)                                      \
    {                                                                                                                \
        cast_blocks(MP_##S, MP_##D, src, dst, n, 0);                                                                 \
    }
#define VEC_STREAM(S, D)                                                                                             \
    VEC_TARGET static void stream_##S##_##D(const void *src, void *dst, size_t n)                                    \
    {                                                                                                                \
        stream_blocks(MP_##S, MP_##D, src, dst, n);                                                                  \
    }
#define VEC_FUSE_SAME(S, D)                                                                                          \
    VEC_TARGET static void fuse_same_##S##_##D(const void *src, const void *add, void *dst, size_t n, double d)      \
    {                                                                                                                \
        fuse_blocks(MP_##S, MP_##S, MP_##D, src, add, dst, n, d);                                                    \
    }
#define VEC_FUSE_F32(S, D)                                                                                           \
    VEC_TARGET static void fuse_f32_##S##_##D(const void *src, const void *add, void *dst, size_t n, double d)       \
    {                                                                                                                \
        fuse_blocks(MP_##S, MP_F32, MP_##D, src, add, dst, n, d);                                                    \
    }

#define VEC_EQUAL(X) X(F64, F64) X(F32, F32) X(BF16, BF16) X(F16, F16)
#define VEC_DIFFERENT(X)                                                                                             \
    X(F64, F32) X(F64, BF16) X(F64, F16)                                                                             \
    X(F32, F64) X(F32, BF16) X(F32, F16)                                                                             \
    X(BF16, F64) X(BF16, F32) X(BF16, F16)                                                                           \
    X(F16, F64) X(F16, F32) X(F16, BF16)
#define VEC_FROM_HALF(X) X(BF16, F32) X(BF16, BF16) X(BF16, F16) X(F16, F32) X(F16, BF16) X(F16, F16)
#define VEC_FROM_F32(X) X(F32, F32) X(F32, BF16) X(F32, F16)

VEC_COPY(F64)
VEC_COPY(F32)
VEC_COPY(BF16)
VEC_COPY(F16)
VEC_DIFFERENT(VEC_CAST)
VEC_FROM_HALF(VEC_FUSE_SAME)
VEC_FROM_F32(VEC_FUSE_SAME)
VEC_FROM_HALF(VEC_FUSE_F32)
#if VEC_STREAM_ALIGN
VEC_DIFFERENT(VEC_STREAM)
#define VEC_STREAM_ENTRY(S, D) .stream[MP_##S][MP_##D] = stream_##S##_##D,
#else
#define VEC_STREAM_ENTRY(S, D)
#endif

#define VEC_CAST_ENTRY(S, D) .cast[MP_##S][MP_##D] = cast_##S##_##D,
#define VEC_SAME_ENTRY(S, D) .fuse_same[MP_##S][MP_##D] = fuse_same_##S##_##D,
#define VEC_F32_ENTRY(S, D) .fuse_f32[MP_##S][MP_##D] = fuse_f32_##S##_##D,
/* With a float32 src, "add of type src" and "add of type float32" are the same kernel. */
#define VEC_BOTH_ENTRY(S, D) VEC_SAME_ENTRY(S, D) .fuse_f32[MP_##S][MP_##D] = fuse_same_##S##_##D,

#define VEC_TABLE                                                                                                    \
    VEC_EQUAL(VEC_CAST_ENTRY) VEC_DIFFERENT(VEC_CAST_ENTRY) VEC_DIFFERENT(VEC_STREAM_ENTRY)                          \
    VEC_FROM_HALF(VEC_SAME_ENTRY) VEC_FROM_HALF(VEC_F32_ENTRY) VEC_FROM_F32(VEC_BOTH_ENTRY)
