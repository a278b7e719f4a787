/* Rows are copied to the device only when they have changed, by the next launch and on its stream.
 *
 * Under stream capture nothing may be allocated or asked, so:
 * - rows that are on the device already are read from there, by a kernel node.  That they are there before the graph
 *   runs is ordered by what orders all inputs of a graph: the steps before it.
 * - rows that changed (a graph's allocations have addresses of their own) go into a slot cut from the reserve, through
 *   a copy node in front of the kernel node.  The pinned memory behind it is kept for good.
 * Memory that a graph fills holds nothing outside it, so the next launch that is not captured sends the rows again.
 */
#include "cuda/table.h"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/slot.h"

/* As cuda/cast.cu reads it. */
typedef struct kernel_row {
    uint64_t src;
    uint64_t add;
    uint64_t dst;
    int64_t numel;
    int64_t first_chunk; /* chunks of all rows before this one */
    uint32_t types;      /* src | add << 8 | dst << 16 */
    uint32_t reserved;
} kernel_row;

_Static_assert(sizeof(kernel_row) == 48, "cuda/cast.cu has the same layout");
_Static_assert(offsetof(kernel_row, first_chunk) == 32 && offsetof(kernel_row, types) == 40, "no padding");

#define TYPE_NONE 255u
#define BLOCK_WARPS (MP_CUDA_BLOCK_THREADS / 32)

/* A chunk is what one warp takes at a time, 2^shift elements: at least one full step of the kernel's loop, and no more
 * than what spreads a table over the whole grid several times. */
#define SHIFT_MIN 9
#define SHIFT_MAX 13
#define CHUNKS_PER_WARP 4

enum { SCALE_KEEP = 0, SCALE_MULTIPLY = 1, SCALE_DIVIDE = 2 };

struct mp_table {
    mp_device *device;
    pthread_mutex_t lock; /* guards the rest; taken before the device's */
    mp_row *rows;         /* as they were set, to tell a change */
    size_t count;
    kernel_row *image; /* those with elements, as the device gets them */
    size_t image_count;
    uint32_t shift;
    int64_t chunks;
    uint64_t bytes_read, bytes_written;
    int changed;   /* `slot` does not hold `image` */
    mp_slot *slot; /* NULL before the first launch */
};

/* ---- Rows to descriptors ---- */

static int
row_is_valid(const mp_row *row, const char **why)
{
    const struct {
        const void *pointer;
        mp_dtype dtype;
        const char *wrong_type, *misaligned;
    } operands[] = {
        {row->src, row->src_dtype, "src has an unknown type", "src is not aligned to its elements"},
        {row->add, row->add_dtype, "add has an unknown type", "add is not aligned to its elements"},
        {row->dst, row->dst_dtype, "dst has an unknown type", "dst is not aligned to its elements"},
    };
    *why = "numel is negative or too large";
    if (row->numel < 0 || row->numel > INT64_MAX / 16) {
        return 0;
    }
    *why = "dst is NULL";
    if (row->numel > 0 && row->dst == NULL) {
        return 0;
    }
    for (size_t i = 0; i < 3; i++) {
        if (row->numel == 0 || operands[i].pointer == NULL) {
            continue;
        }
        *why = operands[i].wrong_type;
        const size_t size = mp_dtype_size(operands[i].dtype);
        if (size == 0) {
            return 0;
        }
        *why = operands[i].misaligned;
        if ((uintptr_t)operands[i].pointer % size != 0) {
            return 0;
        }
    }
    return 1;
}

/* Elements of all rows, or -1 with an error. */
static int64_t
check_rows(const mp_row *rows, size_t count, mp_error *err)
{
    int64_t total = 0;
    if (count > 0 && rows == NULL) {
        mp_error_set(err, MP_ERR_ARGUMENT, "rows are NULL");
        return -1;
    }
    if (count > INT_MAX) {
        mp_error_set(err, MP_ERR_ARGUMENT, "%zu rows are too many for one table", count);
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        const char *why;
        if (!row_is_valid(&rows[i], &why)) {
            mp_error_set(err, MP_ERR_ARGUMENT, "row %zu: %s", i, why);
            return -1;
        }
        if (__builtin_add_overflow(total, rows[i].numel, &total)) {
            mp_error_set(err, MP_ERR_ARGUMENT, "row %zu: too many elements in all", i);
            return -1;
        }
    }
    return total;
}

static uint32_t
choose_shift(const mp_device *device, int64_t total)
{
    const int64_t wanted = (int64_t)device->grid * BLOCK_WARPS * CHUNKS_PER_WARP;
    uint32_t shift = SHIFT_MAX;
    while (shift > SHIFT_MIN && total >> shift < wanted) {
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
static int64_t
chunks_of(const mp_row *row, uint32_t shift)
{
    const int64_t rest = row->numel - head_of(row);
    const int64_t chunks = (rest >> shift) + ((rest & (((int64_t)1 << shift) - 1)) != 0);
    return chunks > 0 ? chunks : 1;
}

static void
build_image(mp_table *table, const mp_row *rows, size_t count, int64_t total)
{
    table->shift = choose_shift(table->device, total);
    table->chunks = 0;
    table->image_count = 0;
    table->bytes_read = table->bytes_written = 0;
    for (size_t i = 0; i < count; i++) {
        const mp_row *row = &rows[i];
        if (row->numel == 0) {
            continue;
        }
        const uint32_t src = row->src != NULL ? (uint32_t)row->src_dtype : TYPE_NONE;
        const uint32_t add = row->add != NULL ? (uint32_t)row->add_dtype : TYPE_NONE;
        table->image[table->image_count++] = (kernel_row){
            .src = (uintptr_t)row->src,
            .add = (uintptr_t)row->add,
            .dst = (uintptr_t)row->dst,
            .numel = row->numel,
            .first_chunk = table->chunks,
            .types = src | add << 8 | (uint32_t)row->dst_dtype << 16,
        };
        table->chunks += chunks_of(row, table->shift);
        const uint64_t numel = (uint64_t)row->numel;
        table->bytes_read += row->src != NULL ? numel * mp_dtype_size(row->src_dtype) : 0;
        table->bytes_read += row->add != NULL ? numel * mp_dtype_size(row->add_dtype) : 0;
        table->bytes_written += numel * mp_dtype_size(row->dst_dtype);
    }
}

/* Bytes of a row that mean something; what follows is padding. */
#define ROW_BYTES (offsetof(mp_row, dst_dtype) + sizeof(mp_dtype))

static int
same_rows(const mp_table *table, const mp_row *rows, size_t count)
{
    if (count != table->count) {
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        if (memcmp(&rows[i], &table->rows[i], ROW_BYTES) != 0) {
            return 0;
        }
    }
    return 1;
}

static mp_status
set_rows_lock_held(mp_table *table, const mp_row *rows, size_t count, mp_error *err)
{
    if (same_rows(table, rows, count)) {
        return MP_OK;
    }
    const int64_t total = check_rows(rows, count, err);
    if (total < 0) {
        return err->status;
    }
    if (count > table->count) {
        /* Both or neither, so that a failure leaves the table as it was. */
        mp_row *more_rows = malloc(count * sizeof *more_rows);
        kernel_row *more_image = malloc(count * sizeof *more_image);
        if (more_rows == NULL || more_image == NULL) {
            free(more_rows);
            free(more_image);
            return mp_error_set(err, MP_ERR_MEMORY, "out of memory for a table of %zu rows", count);
        }
        free(table->rows);
        free(table->image);
        table->rows = more_rows;
        table->image = more_image;
    }
    if (count > 0) {
        memcpy(table->rows, rows, count * sizeof *rows);
    }
    table->count = count;
    build_image(table, rows, count, total);
    table->changed = 1;
    return MP_OK;
}

mp_status
mp_cuda_table_set(mp_table *table, const mp_row *rows, size_t count, mp_error *err)
{
    mp_status status = mp_cuda_check_fork(err);
    if (status != MP_OK) {
        return status;
    }
    pthread_mutex_lock(&table->lock);
    status = set_rows_lock_held(table, rows, count, err);
    pthread_mutex_unlock(&table->lock);
    return status;
}

mp_status
mp_cuda_table_new(mp_device *device, mp_table **out, mp_error *err)
{
    *out = NULL;
    const mp_status status = mp_cuda_check_fork(err);
    if (status != MP_OK) {
        return status;
    }
    mp_table *table = calloc(1, sizeof *table);
    if (table == NULL) {
        return mp_error_set(err, MP_ERR_MEMORY, "out of memory for a table");
    }
    table->device = device;
    pthread_mutex_init(&table->lock, NULL);
    *out = table;
    return MP_OK;
}

void
mp_cuda_table_free(mp_table *table)
{
    if (table == NULL) {
        return;
    }
    mp_error ignored;
    if (mp_cuda_check_fork(&ignored) == MP_OK) {
        /* In a forked child the device's lock may be held for ever; its memory is not ours there anyway. */
        mp_slot_give(table->device, table->slot);
    }
    pthread_mutex_destroy(&table->lock);
    free(table->rows);
    free(table->image);
    free(table);
}

/* ---- Sending ---- */

static size_t
image_bytes(const mp_table *table)
{
    return table->image_count * sizeof(kernel_row);
}

/* Enqueues the copy of the slot's staging memory.  Under capture this is a node of the graph. */
static mp_status
copy(mp_table *table, mp_slot *slot, cu_stream stream, mp_error *err)
{
    mp_device *device = table->device;
    const mp_status status =
        MP_CUDA(device, err, cuMemcpyHtoDAsync, slot->memory, slot->staging, image_bytes(table), stream);
    if (status == MP_OK) {
        atomic_fetch_add_explicit(&device->uploads, 1, memory_order_relaxed);
    }
    return status;
}

static mp_status
send(mp_table *table, cu_stream stream, int caller, mp_error *err)
{
    mp_device *device = table->device;
    mp_slot *slot;
    mp_status status = mp_slot_take(device, image_bytes(table), &slot, err);
    if (status != MP_OK) {
        return status;
    }
    memcpy(slot->staging, table->image, image_bytes(table));
    slot->caller_upload = caller;
    status = copy(table, slot, stream, err);
    if (status == MP_OK) {
        status = MP_CUDA(device, err, cuEventRecord, slot->uploaded, stream);
        slot->uploading = status == MP_OK;
        if (status != MP_OK) {
            /* The copy may be under way and nothing can tell when it is over: never use this memory again. */
            slot->captured = 1;
        }
    }
    if (status != MP_OK) {
        mp_slot_give(device, slot);
        return status;
    }
    mp_slot_give(device, table->slot);
    table->slot = slot;
    table->changed = 0;
    return MP_OK;
}

static mp_status
send_captured(mp_table *table, cu_stream stream, mp_error *err)
{
    mp_slot *slot = table->slot;
    if (!table->changed && slot != NULL && slot->last_stream == stream) {
        return copy(table, slot, stream, err); /* the same bytes once more, in order on the same stream */
    }
    mp_status status = mp_slot_take_captured(table->device, image_bytes(table), &slot, err);
    if (status != MP_OK) {
        return status;
    }
    memcpy(slot->staging, table->image, image_bytes(table));
    slot->captured_upload = 1;
    slot->last_stream = stream;
    status = copy(table, slot, stream, err);
    if (status != MP_OK) {
        mp_slot_give(table->device, slot); /* which keeps it: a node may exist */
        return status;
    }
    mp_slot_give(table->device, table->slot);
    table->slot = slot;
    table->changed = 0;
    return MP_OK;
}

/* The slot does not hold the rows, or only while a graph runs. */
static int
is_stale(const mp_table *table)
{
    return table->changed || table->slot == NULL || table->slot->captured_upload;
}

static mp_status
place_captured(mp_table *table, cu_stream stream, mp_error *err)
{
    if (is_stale(table)) {
        return send_captured(table, stream, err);
    }
    table->slot->captured = 1;
    return MP_OK;
}

/* Orders the stream after the copy, if that was made on another one.  Launches of one table write the same memory, so
 * callers have ordered them already, and the copy with them.  But where a caller forgot, wrong values are to be the
 * worst of it, never a table of wild pointers. */
static mp_status
order_after_copy(mp_table *table, cu_stream stream, int caller, mp_error *err)
{
    mp_device *device = table->device;
    mp_slot *slot = table->slot;
    mp_status status = mp_slot_poll(device, slot->uploaded, &slot->uploading, err);
    if (status == MP_OK && slot->uploading && (caller || slot->caller_upload)) {
        status = MP_CUDA(device, err, cuStreamWaitEvent, stream, slot->uploaded, 0);
    }
    return status;
}

/* Makes sure that the device has the rows when the stream gets there.  In a steady step this does nothing. */
static mp_status
place(mp_table *table, cu_stream stream, int caller, mp_error *err)
{
    mp_device *device = table->device;
    const int stale = is_stale(table);
    if (!stale && !table->slot->uploading && mp_slot_reserved(device)) {
        return MP_OK;
    }
    int mode;
    mp_status status = mp_cuda_relax(device, &mode, err);
    if (status != MP_OK) {
        return status;
    }
    status = mp_slot_reserve(device, err);
    if (status == MP_OK) {
        status = stale ? send(table, stream, caller, err) : order_after_copy(table, stream, caller, err);
    }
    return mp_cuda_restore(device, mode, status, err);
}

/* ---- Launching ---- */

/* `used` is recorded again after this launch and must stand for those before it too.  Callers have ordered these, as
 * above. */
static mp_status
order_after_launches(mp_table *table, cu_stream stream, int caller, mp_error *err)
{
    mp_slot *slot = table->slot;
    if (!caller || !slot->in_use || slot->last_stream == stream) {
        return MP_OK;
    }
    return MP_CUDA(table->device, err, cuStreamWaitEvent, stream, slot->used, 0);
}

/* Notes that the slot is read by what was just launched. */
static mp_status
track(mp_table *table, cu_stream stream, int caller, mp_error *err)
{
    mp_slot *slot = table->slot;
    if (!caller) {
        slot->private_reads = 1;
        return MP_OK;
    }
    const mp_status status = MP_CUDA(table->device, err, cuEventRecord, slot->used, stream);
    if (status == MP_OK) {
        slot->in_use = 1;
        slot->last_stream = stream;
    }
    else {
        slot->captured = 1; /* nothing can tell when it is read: never written again */
    }
    return status;
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

static mp_status
launch(mp_table *table, double divisor, cu_stream stream, mp_error *err)
{
    mp_device *device = table->device;
    const int64_t blocks = (table->chunks + BLOCK_WARPS - 1) / BLOCK_WARPS;
    const unsigned grid = blocks < (int64_t)device->grid ? (unsigned)blocks : device->grid;
    cu_deviceptr rows = table->slot->memory;
    uint32_t count = (uint32_t)table->image_count;
    double factor;
    uint32_t scaling = choose_scaling(divisor, &factor);
    void *parameters[] = {&rows, &count, &table->shift, &table->chunks, &factor, &scaling};
    const mp_status status = MP_CUDA(device, err, cuLaunchKernel, device->kernel, grid, 1, 1, MP_CUDA_BLOCK_THREADS, 1,
                                     1, 0, stream, parameters, NULL);
    if (status == MP_OK) {
        atomic_fetch_add_explicit(&device->launches, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->bytes_read, table->bytes_read, memory_order_relaxed);
        atomic_fetch_add_explicit(&device->bytes_written, table->bytes_written, memory_order_relaxed);
    }
    return status;
}

static mp_status
run_lock_held(mp_table *table, double divisor, cu_stream stream, int caller, mp_error *err)
{
    int capturing;
    mp_status status = mp_cuda_capturing(table->device, stream, &capturing, err);
    if (status != MP_OK) {
        return status;
    }
    if (capturing) {
        status = place_captured(table, stream, err);
        return status != MP_OK ? status : launch(table, divisor, stream, err);
    }
    if ((status = place(table, stream, caller, err)) != MP_OK ||
        (status = order_after_launches(table, stream, caller, err)) != MP_OK ||
        (status = launch(table, divisor, stream, err)) != MP_OK) {
        return status;
    }
    return track(table, stream, caller, err);
}

static mp_status
run(mp_table *table, double divisor, cu_stream stream, int caller, mp_error *err)
{
    /* Entered before the lock is taken: in a forked child it may be held for ever. */
    mp_status status = mp_cuda_enter(table->device, err);
    if (status != MP_OK) {
        return status;
    }
    pthread_mutex_lock(&table->lock);
    if (table->image_count > 0) {
        status = run_lock_held(table, divisor, stream, caller, err);
    }
    pthread_mutex_unlock(&table->lock);
    return mp_cuda_leave(table->device, status, err);
}

mp_status
mp_cuda_launch(mp_table *table, double divisor, mp_error *err)
{
    return run(table, divisor, table->device->stream, 0, err);
}

mp_status
mp_cuda_launch_on(mp_table *table, double divisor, void *caller_stream, mp_error *err)
{
    return run(table, divisor, (cu_stream)caller_stream, 1, err);
}
