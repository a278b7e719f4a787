/* Rows are copied into the arguments of the kernel, and those by the driver while it takes the launch.  So a list needs
 * nothing that would have to be allocated, sent, waited for or kept: stream capture is no special case, and a graph that
 * is replayed has the rows that it was captured with. */
#include "cuda/launch.h"

#include <stddef.h>

/* As cuda/cast.cu reads it. */
typedef struct kernel_row {
    uint64_t src;
    uint64_t add;
    uint64_t dst;
    int64_t numel;
    uint32_t first_chunk; /* chunks of all rows before this one */
    uint32_t types;       /* src | add << 8 | dst << 16 */
} kernel_row;

/* The arguments of one launch, and what it moves. */
typedef struct batch {
    kernel_row rows[MP_CUDA_ROWS];
    uint32_t count;
    uint32_t shift;
    uint32_t chunks; /* of all rows */
    uint32_t scaling;
    double factor;
    uint64_t bytes_read, bytes_written;
} batch;

_Static_assert(sizeof(kernel_row) == 40 && offsetof(kernel_row, types) == 36, "cuda/cast.cu has the same layout");
_Static_assert(offsetof(batch, bytes_read) <= MP_CUDA_ARGUMENT_BYTES, "the driver takes no more");

#define TYPE_NONE 255u
#define BLOCK_WARPS (MP_CUDA_BLOCK_THREADS / 32)

/* Elements of one row: the chunks of MP_CUDA_ROWS such rows are counted in 32 bits. */
#define NUMEL_MAX ((int64_t)1 << 37)
_Static_assert((NUMEL_MAX >> MP_CUDA_SHIFT_MAX) * MP_CUDA_ROWS < UINT32_MAX / 2, "chunks are counted in 32 bits");

enum { SCALE_KEEP = 0, SCALE_MULTIPLY = 1, SCALE_DIVIDE = 2 };

/* ---- The grid ---- */

/* Bytes of loads that keep a multiprocessor's memory busy, in KiB, by architecture: the figures of NVIDIA's CUB. */
static int
wanted_in_flight(int capability)
{
    return capability >= 100 ? 64 : capability >= 90 ? 48 : 16;
}

/* A block of the kernel loads 16 KiB at a time at best; twice the blocks that needs make up for short rows, and leave room
 * on older devices for what computes meanwhile. */
mp_status
mp_cuda_choose_grid(mp_device *device, cu_device handle, int capability, mp_error *err)
{
    int multiprocessors = 0, resident = 0;
    mp_status status =
        MP_CUDA(device, err, cuDeviceGetAttribute, &multiprocessors, CU_ATTRIBUTE_SM_COUNT, handle);
    if (status == MP_OK) {
        status = MP_CUDA(device, err, cuOccupancyMaxActiveBlocksPerMultiprocessor, &resident, device->kernel,
                         MP_CUDA_BLOCK_THREADS, 0);
    }
    if (status != MP_OK) {
        return status;
    }
    const int wanted = 2 * wanted_in_flight(capability) / 16;
    const int blocks = resident < wanted ? resident : wanted;
    if (multiprocessors < 1 || blocks < 1) {
        return mp_error_set(err, MP_ERR_DEVICE, "the kernel does not fit device %d", device->index);
    }
    const int aside = blocks < MP_CUDA_PRIVATE_BLOCKS ? blocks : MP_CUDA_PRIVATE_BLOCKS;
    device->grid = (unsigned)multiprocessors * (unsigned)blocks;
    device->private_grid = (unsigned)multiprocessors * (unsigned)aside;
    return MP_OK;
}

/* ---- Rows to arguments ---- */

static int
is_aligned(const void *pointer, mp_dtype dtype)
{
    return pointer == NULL || (uintptr_t)pointer % mp_dtype_size(dtype) == 0;
}

/* Why the kernel cannot take the row, or NULL. */
static const char *
fault_of(const mp_row *row)
{
    const char *why = mp_row_fault(row);
    if (why != NULL || row->numel == 0) {
        return why;
    }
    if (row->numel > NUMEL_MAX) {
        return "numel is negative or too large";
    }
    if (!is_aligned(row->src, row->src_dtype)) {
        return "src is not aligned to its elements";
    }
    if (!is_aligned(row->add, row->add_dtype)) {
        return "add is not aligned to its elements";
    }
    return is_aligned(row->dst, row->dst_dtype) ? NULL : "dst is not aligned to its elements";
}

static mp_status
check_rows(const mp_row *rows, size_t count, mp_error *err)
{
    if (count > 0 && rows == NULL) {
        return mp_error_set(err, MP_ERR_ARGUMENT, "rows are NULL");
    }
    for (size_t i = 0; i < count; i++) {
        const char *why = fault_of(&rows[i]);
        if (why != NULL) {
            return mp_error_set(err, MP_ERR_ARGUMENT, "row %zu: %s", i, why);
        }
    }
    return MP_OK;
}

/* The factor that the kernel gets, and what it does with it. */
static uint32_t
choose_scaling(double divisor, double *factor)
{
    *factor = divisor;
    if (divisor == 1.0) {
        return SCALE_KEEP;
    }
    if (mp_divisor_is_exact(divisor)) {
        *factor = 1.0 / divisor;
        return SCALE_MULTIPLY;
    }
    return SCALE_DIVIDE;
}

static uint32_t
choose_shift(unsigned grid, int64_t total)
{
    const int64_t wanted = (int64_t)grid * BLOCK_WARPS * MP_CUDA_CHUNKS_PER_WARP;
    uint32_t shift = MP_CUDA_SHIFT_MAX;
    while (shift > MP_CUDA_SHIFT_MIN && total >> shift < wanted) {
        shift--;
    }
    return shift;
}

/* Elements before the destination is aligned to 16 bytes, by the rule of the kernel's head_of. */
static int64_t
head_of(const mp_row *row)
{
    const uintptr_t bytes = -(uintptr_t)row->dst % 16;
    const int64_t head = (int64_t)(bytes / mp_dtype_size(row->dst_dtype));
    return head < row->numel ? head : row->numel;
}

/* The first chunk has the head too, so a row that is all head is one chunk. */
static uint32_t
chunks_of(const mp_row *row, uint32_t shift)
{
    const int64_t rest = row->numel - head_of(row);
    const int64_t chunks = (rest >> shift) + ((rest & (((int64_t)1 << shift) - 1)) != 0);
    return chunks > 0 ? (uint32_t)chunks : 1;
}

/* How many of the rows fit one launch, those without elements apart; *total counts elements. */
static size_t
rows_that_fit(const mp_row *rows, size_t count, int64_t *total)
{
    size_t taken = 0, end = 0;
    *total = 0;
    for (; end < count && taken < MP_CUDA_ROWS; end++) {
        taken += rows[end].numel > 0;
        *total += rows[end].numel;
    }
    return end;
}

/* Fills the batch with the first rows; returns how many of them that were. */
static size_t
fill(batch *into, const mp_row *rows, size_t count, unsigned grid)
{
    int64_t total;
    const size_t end = rows_that_fit(rows, count, &total);
    into->shift = choose_shift(grid, total);
    into->count = into->chunks = 0;
    into->bytes_read = into->bytes_written = 0;
    for (const mp_row *row = rows; row < rows + end; row++) {
        if (row->numel == 0) {
            continue;
        }
        const uint32_t src = row->src != NULL ? (uint32_t)row->src_dtype : TYPE_NONE;
        const uint32_t add = row->add != NULL ? (uint32_t)row->add_dtype : TYPE_NONE;
        into->rows[into->count++] = (kernel_row){
            .src = (uintptr_t)row->src,
            .add = (uintptr_t)row->add,
            .dst = (uintptr_t)row->dst,
            .numel = row->numel,
            .first_chunk = into->chunks,
            .types = src | add << 8 | (uint32_t)row->dst_dtype << 16,
        };
        into->chunks += chunks_of(row, into->shift);
        mp_row_count_bytes(row, &into->bytes_read, &into->bytes_written);
    }
    return end;
}

/* ---- Launching ---- */

static mp_status
launch(mp_device *device, batch *from, unsigned grid, cu_stream stream, mp_error *err)
{
    const uint32_t blocks = (from->chunks + BLOCK_WARPS - 1) / BLOCK_WARPS;
    void *arguments[] = {from->rows, &from->count, &from->shift, &from->chunks, &from->scaling, &from->factor};
    const mp_status status = MP_CUDA(device, err, cuLaunchKernel, device->kernel, blocks < grid ? blocks : grid, 1, 1,
                                     MP_CUDA_BLOCK_THREADS, 1, 1, 0, stream, arguments, NULL);
    if (status == MP_OK) {
        atomic_fetch_add_explicit(&device->launches, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->bytes_read, from->bytes_read, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->bytes_written, from->bytes_written, memory_order_relaxed);
    }
    return status;
}

static mp_status
run(mp_device *device, const mp_row *rows, size_t count, double divisor, unsigned grid, cu_stream stream, mp_error *err)
{
    mp_status status = check_rows(rows, count, err);
    if (status == MP_OK) {
        status = mp_cuda_enter(device, err);
    }
    if (status != MP_OK) {
        return status;
    }
    batch next;
    next.scaling = choose_scaling(divisor, &next.factor);
    while (status == MP_OK && count > 0) {
        const size_t taken = fill(&next, rows, count, grid);
        if (next.count > 0) {
            status = launch(device, &next, grid, stream, err);
        }
        rows += taken;
        count -= taken;
    }
    return mp_cuda_leave(device, status, err);
}

mp_status
mp_cuda_launch(mp_device *device, const mp_row *rows, size_t count, double divisor, mp_error *err)
{
    return run(device, rows, count, divisor, device->private_grid, device->stream, err);
}

mp_status
mp_cuda_launch_on(mp_device *device, const mp_row *rows, size_t count, double divisor, void *caller_stream,
                  mp_error *err)
{
    return run(device, rows, count, divisor, device->grid, (cu_stream)caller_stream, err);
}
