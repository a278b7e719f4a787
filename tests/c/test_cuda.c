/* Tests of the CUDA backend, against the simulated driver of tests/simcuda: opening and its failures, conversion bit
 * for bit, uploads, order between streams, memory that is in use, events, capture, faults, fork.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/simcuda tests/c/test_cuda.c csrc/core/backend.c csrc/cuda/backend.c csrc/cuda/driver.c csrc/cuda/image.c csrc/cuda/nvrtc.c csrc/cuda/slot.c csrc/cuda/table.c csrc/host/convert.c csrc/host/convert_scalar.c csrc/host/convert_avx2.c csrc/host/convert_avx512.c csrc/host/convert_neon.c -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free -ldl -lm -o test_cuda
 *
 * DDP_MP_SIMCUDA names the simulated libcuda.so.1 and DDP_MP_IMAGE the file that kernels/build_image.py makes.  Without
 * them, all that is tested is that a machine without a driver is told so.
 *
 * test_cuda               everything
 * test_cuda convert NOTE  conversion alone, on the driver and device that the environment gives the simulator; the
 *                         image in use is NOTE
 * test_cuda threads       what is shared between threads, alone: for ThreadSanitizer
 * test_cuda refuse TEXT   opening fails and the error contains TEXT
 */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/backend.h"
#include "cuda/backend.h"
#include "host/convert.h"
#include "check.h"
#include "cuda/device.h"
#include "cuda/embedded.h"
#include "cuda/slot.h"
#include "malloc_fault.h"
#include "simcuda.h"

/* ---- What the build would have embedded: read from a file, so defined where C cannot see that it is written ---- */

__asm__(".pushsection .bss\n"
        ".balign 64\n"
        ".globl mp_cuda_image\n"
        "mp_cuda_image:\n"
        "image_room: .skip 4194304\n"
        ".globl mp_cuda_image_size\n"
        "mp_cuda_image_size:\n"
        "image_size: .skip 8\n"
        ".popsection\n");
extern unsigned char image_room[];
extern size_t image_size;

const char mp_cuda_image_note[] = "no image in this test";
const char mp_cuda_source[] = "";

/* ---- The simulator, by name ---- */

typedef struct driver {
    int (*cuStreamCreate)(void **stream, unsigned flags);
    int (*cuStreamBeginCapture)(void *stream, int mode);
    int (*cuStreamEndCapture)(void *stream, void **graph);
    int (*cuThreadExchangeStreamCaptureMode)(int *mode);
    int (*cuCtxGetCurrent)(void **context);
    int (*cuCtxPushCurrent)(void *context);
    int (*cuCtxPopCurrent)(void **context);
    int (*cuDevicePrimaryCtxRetain)(void **context, int device);
    int (*cuGraphInstantiate)(void **exec, void *graph, unsigned long long flags);
    int (*cuGraphLaunch)(void *exec, void *stream);
    int (*cuStreamSynchronize)(void *stream);
    void (*begin)(int schedule, uint64_t seed);
    const char *(*report)(void);
    int (*report_count)(const char *kind);
    int (*live)(const char *kind);
    uint64_t (*calls)(const char *api);
    uint64_t (*blocking)(void);
    void (*fault)(const char *api, uint64_t nth, int code, uint64_t times);
    void (*fault_kernel)(uint64_t nth, int code);
    void (*set_devices)(const char *capabilities);
    uint64_t (*forked_calls)(void);
    void (*own)(void *base, size_t bytes, const char *label, int device);
    void (*disown)(void *base);
    int (*work)(void *stream, const sim_range *ranges, size_t count, void *into, const void *data, size_t bytes,
                const char *label);
    int (*access)(void *stream, const sim_range *ranges, size_t count, const char *label);
    int (*enter)(void *stream);
    int (*step)(int count);
} driver;

static driver sim;
static const mp_backend *const backend = &mp_backend_cuda;
static mp_device *device;
static mp_error error;

#define OK(call)                                                                                                      \
    do {                                                                                                              \
        error.text[0] = '\0';                                                                                         \
        CHECK_EQ((call), MP_OK);                                                                                      \
        if (error.text[0] != '\0') {                                                                                  \
            fprintf(stderr, "  %s\n", error.text);                                                                    \
        }                                                                                                             \
    } while (0)

static const int schedules[] = {SIM_EAGER, SIM_LAZY, SIM_RANDOM, SIM_RANDOM, SIM_THREAD};
static const size_t schedule_count = sizeof schedules / sizeof *schedules;

static void
resolve(void *library, void *field, const char *name)
{
    void *address = dlsym(library, name);
    if (address == NULL) {
        fprintf(stderr, "the simulated driver has no %s\n", name);
        exit(2);
    }
    memcpy(field, &address, sizeof address);
}

static void
load_simulator(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    resolve(library, &sim.cuStreamCreate, "cuStreamCreate");
    resolve(library, &sim.cuStreamBeginCapture, "cuStreamBeginCapture_v2");
    resolve(library, &sim.cuStreamEndCapture, "cuStreamEndCapture");
    resolve(library, &sim.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    resolve(library, &sim.cuCtxGetCurrent, "cuCtxGetCurrent");
    resolve(library, &sim.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    resolve(library, &sim.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    resolve(library, &sim.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    resolve(library, &sim.cuGraphInstantiate, "cuGraphInstantiateWithFlags");
    resolve(library, &sim.cuGraphLaunch, "cuGraphLaunch");
    resolve(library, &sim.cuStreamSynchronize, "cuStreamSynchronize");
    resolve(library, &sim.begin, "sim_begin");
    resolve(library, &sim.report, "sim_report");
    resolve(library, &sim.report_count, "sim_report_count");
    resolve(library, &sim.live, "sim_live");
    resolve(library, &sim.calls, "sim_calls");
    resolve(library, &sim.blocking, "sim_blocking_calls");
    resolve(library, &sim.fault, "sim_fault");
    resolve(library, &sim.fault_kernel, "sim_fault_kernel");
    resolve(library, &sim.set_devices, "sim_set_devices");
    resolve(library, &sim.forked_calls, "sim_forked_calls");
    resolve(library, &sim.own, "sim_register");
    resolve(library, &sim.disown, "sim_unregister");
    resolve(library, &sim.work, "sim_work");
    resolve(library, &sim.access, "sim_access");
    resolve(library, &sim.enter, "sim_enter");
    resolve(library, &sim.step, "sim_step");
}

static void
load_image(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "cannot open %s\n", path);
        exit(2);
    }
    image_size = fread(image_room, 1, 4194304, file);
    fclose(file);
}

/* ---- Memory of a framework ---- */

static void *
device_memory(size_t bytes, const char *label)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(memory, 0xA5, (bytes + 63) / 64 * 64);
    sim.own(memory, (bytes + 63) / 64 * 64, label, 0);
    return memory;
}

static void
release(void *memory)
{
    sim.disown(memory);
    free(memory);
}

static void *
new_stream(void)
{
    void *context, *stream = NULL;
    CHECK_EQ(sim.cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(sim.cuCtxPushCurrent(context), 0);
    CHECK_EQ(sim.cuStreamCreate(&stream, 1), 0);
    return stream;
}

/* A table with a float32 -> bfloat16 row, the values that it reads and where they go.  Rows of one element pad it to a
 * size that few tests use, where a test wants to see its own slots being used again. */
#define COUNT 3000
#define MAX_PAD 400
typedef struct fixture {
    float *master;
    uint16_t *low, *padding;
    mp_row row; /* the first, which tests change */
    size_t pad;
    mp_table *table;
} fixture;

static mp_status
set_rows(fixture *f)
{
    static mp_row rows[1 + MAX_PAD];
    rows[0] = f->row;
    for (size_t i = 0; i < f->pad; i++) {
        rows[1 + i] = (mp_row){NULL, NULL, f->padding + i, 1, MP_F32, MP_F32, MP_BF16};
    }
    return backend->table_set(f->table, rows, 1 + f->pad, &error);
}

static void
fixture_init_padded(fixture *f, size_t pad)
{
    f->master = device_memory(COUNT * sizeof *f->master, "master");
    f->low = device_memory(COUNT * sizeof *f->low, "low");
    f->padding = device_memory((1 + pad) * sizeof *f->padding, "padding");
    f->pad = pad;
    for (int i = 0; i < COUNT; i++) {
        f->master[i] = (float)i;
    }
    f->row = (mp_row){f->master, NULL, f->low, COUNT, MP_F32, MP_F32, MP_BF16};
    OK(backend->table_new(device, &f->table, &error));
    OK(set_rows(f));
}

static void
fixture_init(fixture *f)
{
    fixture_init_padded(f, 0);
}

static void
fixture_fini(fixture *f)
{
    OK(backend->synchronize(device, &error));
    backend->table_free(f->table);
    release(f->master);
    release(f->low);
    release(f->padding);
}

/* Queues `value` for every master on the stream, as an optimizer would write it. */
static void
write_masters(const fixture *f, void *stream, float value)
{
    static float values[COUNT];
    for (int i = 0; i < COUNT; i++) {
        values[i] = value;
    }
    const sim_range range = {f->master, sizeof values, 1};
    sim.work(stream, &range, 1, f->master, values, sizeof values, "optimizer");
}

/* Queues a read of what was cast, as a layer's kernel would, and returns the first value. */
static float
read_low(const fixture *f, void *stream)
{
    const sim_range range = {f->low, COUNT * sizeof *f->low, 0};
    sim.enter(stream);
    const uint32_t bits = (uint32_t)f->low[COUNT - 1] << 16;
    sim.access(stream, &range, 1, "layer");
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void
expect_clean(void)
{
    CHECK_STR_EQ(sim.report(), "");
}

/* ---- Opening ---- */

static void
test_open_without_driver_says_so(void)
{
    char text[256];
    mp_cuda_status(text, sizeof text);
    CHECK_STR_EQ(text, "not used yet");
    if (backend->open(0, &device, &error) == MP_OK) {
        return; /* a machine with a device */
    }
    CHECK(error.status == MP_ERR_UNAVAILABLE || error.status == MP_ERR_DEVICE);
    CHECK(error.text[0] != '\0');
    mp_cuda_status(text, sizeof text);
    CHECK(strncmp(text, "off: ", 5) == 0 && strstr(text, error.text) != NULL);
    CHECK_EQ(mp_cuda_is_simulated(), 0);
}

static void
test_open_without_image_says_so(void)
{
    const size_t size = image_size;
    image_size = 0;
    CHECK_EQ(backend->open(0, &device, &error), MP_ERR_UNAVAILABLE);
    CHECK(strncmp(error.text, "no kernel for device 0 (sm_90): no image in this test; ", 55) == 0);
    image_size = size;
}

/* Opening fails: the error begins so, and the status says it too. */
static void
expect_refused(int index, mp_status status, const char *begins)
{
    char text[256];
    mp_device *none = device;
    CHECK_EQ(backend->open(index, &none, &error), status);
    CHECK(none == NULL);
    CHECK_EQ(error.status, status);
    if (strncmp(error.text, begins, strlen(begins)) != 0) {
        CHECK_STR_EQ(error.text, begins);
    }
    mp_cuda_status(text, sizeof text);
    CHECK(strstr(text, begins) != NULL);
}

/* First of all, since the driver is initialised once a process. */
static void
test_initialisation_survives_every_fault(void)
{
    const char *why;
    CHECK(mp_cuda_load(&why) != NULL);
    const struct {
        const char *failing;
        int code;
        mp_status status;
        const char *text;
    } cases[] = {
        {"cuInit", 999, MP_ERR_DEVICE, "cuInit failed: CUDA_ERROR_UNKNOWN (999): "},
        {"cuInit", 100, MP_ERR_UNAVAILABLE, "cuInit failed: CUDA_ERROR_NO_DEVICE (100): "},
        {"cuInit", 34, MP_ERR_UNAVAILABLE, "cuInit failed: CUDA_ERROR_STUB_LIBRARY (34): "},
        {"cuInit", 3, MP_ERR_FORKED, "CUDA was initialised before this process was forked"},
        {"cuDriverGetVersion", 999, MP_ERR_DEVICE, "cuDriverGetVersion failed: CUDA_ERROR_UNKNOWN (999): "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sim.begin(SIM_EAGER, 1);
        sim.fault(cases[i].failing, 1, cases[i].code, 1);
        expect_refused(0, cases[i].status, cases[i].text);
    }
    sim.begin(SIM_EAGER, 1);
}

/* An image that is not for this device gives way to the next one; any other failure is final. */
static void
test_open_tries_the_next_image(void)
{
    sim.begin(SIM_EAGER, 1);
    sim.fault("cuModuleLoadData", 1, 209, 2);
    expect_refused(0, MP_ERR_UNAVAILABLE,
                   "no kernel for device 0 (sm_90): embedded image: CUDA_ERROR_NO_BINARY_FOR_GPU; embedded PTX for older "
                   "drivers: CUDA_ERROR_NO_BINARY_FOR_GPU; NVRTC");
    sim.begin(SIM_EAGER, 1);
    sim.fault("cuModuleLoadData", 1, 209, 1);
    sim.fault("cuModuleGetFunction", 1, 500, 1);
    expect_refused(0, MP_ERR_DEVICE, "cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND (500): ");
    CHECK_EQ(sim.live("modules"), 0);
    sim.begin(SIM_EAGER, 1);
    sim.fault("cuModuleLoadData", 1, 2, 1);
    expect_refused(0, MP_ERR_DEVICE, "cuModuleLoadData failed: CUDA_ERROR_OUT_OF_MEMORY (2): ");
    CHECK_EQ(sim.live("modules"), 0);
    CHECK_EQ(sim.live("streams"), 0);
    sim.begin(SIM_EAGER, 1);
}

static void
test_open_refuses_an_old_device(void)
{
    sim.begin(SIM_EAGER, 1);
    sim.set_devices("70,90");
    expect_refused(0, MP_ERR_UNAVAILABLE, "CUDA device 0 has compute capability 7.0; the oldest supported is 7.5");
    sim.set_devices("90,75");
    CHECK_EQ(sim.live("contexts"), 0);
}

static cu_result
no_blocks(int *blocks, cu_function function, int block_size, size_t shared)
{
    (void)function, (void)block_size, (void)shared;
    *blocks = 0;
    return CU_OK;
}

static void
test_open_refuses_a_device_that_the_kernel_does_not_fit(void)
{
    const char *why;
    mp_cuda_api *api = (mp_cuda_api *)(uintptr_t)mp_cuda_load(&why); /* no constant, though nobody else may change it */
    const mp_cuda_api whole = *api;
    sim.begin(SIM_EAGER, 1);
    api->cuOccupancyMaxActiveBlocksPerMultiprocessor = no_blocks;
    expect_refused(0, MP_ERR_DEVICE, "the kernel does not fit device 0");
    *api = whole;
    CHECK_EQ(sim.live("modules"), 0);
}

/* After what succeeded although its nth call was to fail: it made fewer, so that no failure was passed over. */
static void
expect_fault_to_come(const char *function, uint64_t nth, uint64_t calls_before)
{
    CHECK(sim.calls(function) - calls_before < nth);
}

/* Every call that opening makes fails once: the error names it, nothing is kept, the next open may succeed. */
static void
test_open_survives_every_fault(void)
{
    uint64_t faults = 0;
    const char *why;
    CHECK(mp_cuda_load(&why) != NULL); /* so that no fault falls on looking up a name, which has another way */
    for (uint64_t nth = 1;; nth++) {
        sim.begin(SIM_EAGER, 1);
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 999, 1);
        const mp_status status = backend->open(0, &device, &error);
        if (status == MP_OK) {
            expect_fault_to_come("*", nth, calls);
            break;
        }
        faults++;
        CHECK_EQ(status, MP_ERR_DEVICE);
        CHECK(strncmp(error.text, "cu", 2) == 0 && strstr(error.text, "(999)") != NULL);
        CHECK(device == NULL);
        CHECK_EQ(sim.live("contexts"), 0);
        CHECK_EQ(sim.live("streams"), 0);
        CHECK_EQ(sim.live("modules"), 0);
        CHECK_EQ(sim.live("device"), 0);
        CHECK_EQ(sim.live("pinned"), 0);
        if (nth > 200) {
            CHECK(nth <= 200);
            break;
        }
    }
    CHECK(faults >= 15);
    sim.begin(SIM_EAGER, 1); /* the last fault is still to come */
}

static void
test_open_finds_devices(void)
{
    mp_device *again, *second, *third;
    OK(backend->open(0, &again, &error));
    CHECK(again == device);
    OK(backend->open(1, &second, &error));
    CHECK(second != device);
    CHECK(backend->native_stream(device) != NULL);
    CHECK(backend->native_stream(second) != backend->native_stream(device));
    CHECK_EQ(backend->open(5, &third, &error), MP_ERR_UNAVAILABLE);
    CHECK_STR_EQ(error.text, "there is no CUDA device 5: the driver shows 2");
    CHECK_EQ(backend->open(-1, &third, &error), MP_ERR_UNAVAILABLE);
    CHECK_EQ(backend->open(64, &third, &error), MP_ERR_UNAVAILABLE);
    CHECK_STR_EQ(error.text, "there is no CUDA device 64");
    CHECK(mp_cuda_driver_version() > 0);
    char text[256];
    mp_cuda_status(text, sizeof text);
    CHECK(strstr(text, "device 0: sm_90, embedded image; device 1: sm_75, embedded image") != NULL);
    CHECK_EQ(mp_cuda_is_simulated(), 1);
}

/* ---- Conversion ---- */

static uint64_t
next(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Random bits, or a value of moderate size rounded to the type. */
static void
fill(unsigned char *to, int64_t count, mp_dtype type)
{
    for (int64_t i = 0; i < count; i++, to += mp_dtype_size(type)) {
        const uint64_t bits = next();
        const double value = ldexp((double)(int64_t)next(), (int)(next() % 60) - 90);
        if (bits % 3 == 0) {
            memcpy(to, &bits, mp_dtype_size(type));
        }
        else {
            mp_cast_select("scalar")->cast[MP_F64][type](&value, to, 1);
        }
    }
}

static int
same_value(const unsigned char *a, const unsigned char *b, mp_dtype type)
{
    double x, y;
    mp_cast_select("scalar")->cast[type][MP_F64](a, &x, 1);
    mp_cast_select("scalar")->cast[type][MP_F64](b, &y, 1);
    return memcmp(a, b, mp_dtype_size(type)) == 0 || (isnan(x) && isnan(y));
}

/* A random row with guards around its destination, and the same row for the host. */
typedef struct trial {
    mp_row row, host;
    unsigned char *src, *add, *dst, *host_dst;
    size_t room;
} trial;

static unsigned char *
place(unsigned char **memory, size_t room, mp_dtype type, uint64_t offset)
{
    *memory = device_memory(room, "row");
    return *memory + (1 + offset) * mp_dtype_size(type);
}

static void
trial_init(trial *t)
{
    const int64_t numel = (int64_t)(next() % 6 == 0 ? 0 : next() % 3 == 0 ? next() % 3000 : next() % 70);
    const mp_dtype src = (mp_dtype)(next() % 4), add = (mp_dtype)(next() % 4), dst = (mp_dtype)(next() % 4);
    const uint64_t kind = next() % 5, offset = next() % 18;
    t->room = ((size_t)numel + 40) * 8;
    unsigned char *a = place(&t->src, t->room, src, next() % 18), *b = place(&t->add, t->room, add, next() % 18);
    unsigned char *c = place(&t->dst, t->room, dst, offset), *d = place(&t->host_dst, t->room, dst, offset);
    fill(a, numel, src);
    fill(b, numel, add);
    t->row = (mp_row){a, kind < 2 ? NULL : b, c, numel, src, add, dst};
    t->host = t->row;
    t->host.dst = d;
    if (kind == 3) { /* the source is the destination */
        fill(c, numel, dst);
        memcpy(d, c, (size_t)numel * mp_dtype_size(dst));
        t->row.src = c;
        t->host.src = d;
        t->row.src_dtype = t->host.src_dtype = dst;
    }
    else if (kind == 4) {
        t->row.src = t->host.src = NULL;
    }
}

static void
trial_check(trial *t, double divisor)
{
    const size_t size = mp_dtype_size(t->row.dst_dtype);
    const unsigned char *got = t->row.dst, *want = t->host.dst;
    mp_row_run(mp_cast_select("scalar"), &t->host, 0, t->host.numel, divisor, 0);
    for (int64_t i = 0; i < t->row.numel; i++) {
        CHECK(same_value(got + (size_t)i * size, want + (size_t)i * size, t->row.dst_dtype));
    }
    const size_t before = (size_t)(got - t->dst), after = before + (size_t)t->row.numel * size;
    for (size_t i = 0; i < t->room; i++) {
        CHECK((i >= before && i < after) || t->dst[i] == 0xA5);
    }
    release(t->src);
    release(t->add);
    release(t->dst);
    release(t->host_dst);
}

static void
test_launch_converts_as_the_host(mp_device *on, int rounds)
{
    static const double divisors[] = {1,    1,       2,       3,        1024,    0.5,      -4,       7, 0.1,
                                      1e30, 8,       0x1p130, 0x1p-140, 0x1p126, 0x1p-126, -0x1p125};
    mp_table *table;
    OK(backend->table_new(on, &table, &error));
    for (int round = 0; round < rounds; round++) {
        sim.begin(schedules[round % 4], (uint64_t)round);
        trial trials[12];
        mp_row rows[12];
        const size_t count = 1 + next() % 12;
        const double divisor = divisors[next() % (sizeof divisors / sizeof *divisors)];
        for (size_t i = 0; i < count; i++) {
            trial_init(&trials[i]);
            sim.disown(trials[i].src), sim.own(trials[i].src, trials[i].room, "src", -1);
            sim.disown(trials[i].add), sim.own(trials[i].add, trials[i].room, "add", -1);
            sim.disown(trials[i].dst), sim.own(trials[i].dst, trials[i].room, "dst", -1);
            rows[i] = trials[i].row;
        }
        OK(backend->table_set(table, rows, count, &error));
        OK(backend->launch(table, divisor, &error));
        OK(backend->synchronize(on, &error));
        expect_clean();
        for (size_t i = 0; i < count; i++) {
            trial_check(&trials[i], divisor);
        }
    }
    backend->table_free(table);
}

static void
test_table_empty_launches_nothing(void)
{
    mp_table *table;
    const mp_row empty[] = {{NULL, NULL, NULL, 0, MP_F32, MP_F32, MP_BF16},
                            {NULL, NULL, NULL, 0, MP_F64, MP_F64, MP_F16}};
    sim.begin(SIM_LAZY, 1);
    OK(backend->table_new(device, &table, &error));
    OK(backend->launch(table, 1.0, &error));
    OK(backend->table_set(table, NULL, 0, &error));
    OK(backend->launch(table, 1.0, &error));
    OK(backend->table_set(table, empty, 2, &error));
    OK(backend->launch(table, 2.0, &error));
    CHECK_EQ(sim.calls("cuLaunchKernel"), 0);
    CHECK_EQ(sim.calls("cuMemcpyHtoDAsync"), 0);
    backend->table_free(table);
    backend->table_free(NULL);
}

static void
test_table_set_refuses_bad_rows(void)
{
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    mp_row row = f.row;
    row.numel = -1;
    CHECK_EQ(backend->table_set(f.table, &row, 1, &error), MP_ERR_ARGUMENT);
    row.numel = INT64_MAX;
    CHECK_EQ(backend->table_set(f.table, &row, 1, &error), MP_ERR_ARGUMENT);
    row = f.row;
    row.dst = NULL;
    CHECK_EQ(backend->table_set(f.table, &row, 1, &error), MP_ERR_ARGUMENT);
    row.dst = (char *)f.low + 1;
    CHECK_EQ(backend->table_set(f.table, &row, 1, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "row 0: dst is not aligned to its elements");
    row = f.row;
    row.src_dtype = MP_DTYPE_NONE;
    CHECK_EQ(backend->table_set(f.table, &row, 1, &error), MP_ERR_ARGUMENT);
    CHECK_EQ(backend->table_set(f.table, NULL, 3, &error), MP_ERR_ARGUMENT);
    CHECK_EQ(backend->table_set(f.table, &f.row, (size_t)INT32_MAX + 1, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "2147483648 rows are too many for one table");
    mp_row huge[17];
    for (size_t i = 0; i < 17; i++) {
        huge[i] = f.row;
        huge[i].numel = INT64_MAX / 16;
    }
    CHECK_EQ(backend->table_set(f.table, huge, 17, &error), MP_ERR_ARGUMENT);
    CHECK_STR_EQ(error.text, "row 16: too many elements in all");
    OK(backend->launch(f.table, 1.0, &error)); /* still the good row */
    OK(backend->synchronize(device, &error));
    CHECK_EQ(f.low[1], 0x3f80);
    fixture_fini(&f);
}

/* ---- Uploads ---- */

static void
test_launch_sends_only_changed_rows(void)
{
    fixture f;
    mp_counters before, after;
    fixture_init(&f);
    for (size_t i = 0; i < schedule_count; i++) {
        sim.begin(schedules[i], i);
        mp_row row = f.row;
        row.numel = COUNT - 1 - (int64_t)i; /* not what the last turn left */
        OK(backend->table_set(f.table, &row, 1, &error));
        OK(backend->launch(f.table, 1.0, &error));
        backend->counters(device, &before);
        for (int step = 0; step < 5; step++) {
            OK(backend->table_set(f.table, &row, 1, &error));
            OK(backend->launch(f.table, 1.0, &error));
        }
        backend->counters(device, &after);
        CHECK_EQ(after.uploads, before.uploads);
        CHECK_EQ(after.launches, before.launches + 5);
        CHECK_EQ(after.bytes_read, before.bytes_read + 20 * (uint64_t)row.numel);
        CHECK_EQ(after.bytes_written, before.bytes_written + 10 * (uint64_t)row.numel);
        row.numel--;
        OK(backend->table_set(f.table, &row, 1, &error));
        OK(backend->launch(f.table, 1.0, &error));
        backend->counters(device, &after);
        CHECK_EQ(after.uploads, before.uploads + 1);
        expect_clean();
    }
    fixture_fini(&f);
}

/* Rows that change in every step, with work pending: staging and device memory in use are never written. */
static void
test_table_changes_while_work_is_pending(void)
{
    enum { TABLES = 5, STEPS = 12 };
    fixture f[TABLES];
    void *stream = new_stream();
    for (size_t s = 0; s < schedule_count; s++) {
        sim.begin(schedules[s], s);
        for (int i = 0; i < TABLES; i++) {
            fixture_init(&f[i]);
        }
        for (int step = 0; step < STEPS; step++) {
            for (int i = 0; i < TABLES; i++) {
                f[i].row.numel = COUNT - step;
                OK(backend->table_set(f[i].table, &f[i].row, 1, &error));
                OK(backend->order_after(device, stream, &error));
                OK(backend->launch(f[i].table, 1.0, &error));
                if (i % 2) {
                    /* On both streams, ordered by an event as the engine would. */
                    mp_event *event;
                    OK(backend->event_get(device, &event, &error));
                    OK(backend->event_record(event, &error));
                    OK(backend->event_wait(event, stream, &error));
                    backend->event_put(event);
                    OK(backend->launch_on(f[i].table, 1.0, stream, &error));
                }
            }
        }
        CHECK_EQ(sim.blocking(), 0);
        OK(backend->order_after(device, stream, &error));
        OK(backend->synchronize(device, &error));
        expect_clean();
        for (int i = 0; i < TABLES; i++) {
            fixture_fini(&f[i]);
        }
    }
}

/* A table that is sent on a caller's stream and used on the private one at once. */
static void
test_table_sent_on_one_stream_is_ready_on_others(void)
{
    void *first = new_stream(), *second = new_stream();
    for (size_t s = 0; s < schedule_count; s++) {
        fixture f;
        sim.begin(schedules[s], s);
        fixture_init(&f);
        mp_row row = f.row;
        row.src = NULL; /* writes zeros: then the launches below do not race over the masters */
        row.dst = f.low;
        row.numel = 8;
        OK(backend->table_set(f.table, &row, 1, &error));
        OK(backend->launch_on(f.table, 1.0, first, &error));
        OK(backend->order_after(device, first, &error));
        OK(backend->launch(f.table, 1.0, &error));
        OK(backend->order_after(device, first, &error));
        mp_event *event;
        OK(backend->event_get(device, &event, &error));
        OK(backend->event_record(event, &error));
        OK(backend->event_wait(event, second, &error));
        OK(backend->launch_on(f.table, 1.0, second, &error));
        OK(backend->order_after(device, second, &error));
        backend->event_put(event);
        OK(backend->synchronize(device, &error));
        expect_clean();
        fixture_fini(&f);
    }
}

/* No race over the memory of tables: what the test itself leaves unordered is about its own memory. */
static void
expect_tables_ordered(void)
{
    CHECK(strstr(sim.report(), " memory #") == NULL);
    CHECK_EQ(sim.report_count("*"), sim.report_count("RACE"));
}

/* Callers that forget to order launches of one table get a race over its rows' memory, and none over the table's. */
static void
test_table_is_ordered_where_callers_forget(void)
{
    void *const streams[] = {new_stream(), new_stream(), new_stream()};
    for (int seed = 0; seed < 8; seed++) {
        fixture f;
        sim.begin(schedules[seed % 4], (uint64_t)seed);
        fixture_init_padded(&f, 25);
        for (int step = 0; step < 9; step++) {
            f.row.numel = 8 + step / 3;
            OK(set_rows(&f));
            OK(backend->launch_on(f.table, 1.0, streams[(seed + step) % 3], &error));
            OK(backend->launch_on(f.table, 1.0, streams[step % 3], &error));
            OK(backend->launch(f.table, 1.0, &error));
        }
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(sim.cuStreamSynchronize(streams[i]), 0);
        }
        OK(backend->synchronize(device, &error));
        expect_tables_ordered();
        fixture_fini(&f);
    }
}

static mp_status
launch_somewhere(mp_table *table, void *stream)
{
    return stream != NULL ? backend->launch_on(table, 1.0, stream, &error) : backend->launch(table, 1.0, &error);
}

/* A slot given back with work pending is not taken: its copy alone (the launch failed), its copy that no event marks,
 * its launch on either stream after the copy is done.  Each has a size of its own, so that the queue holds nothing
 * else. */
static void
test_slot_in_use_is_not_taken(void)
{
    void *stream = new_stream();
    const struct {
        const char *failing;
        size_t pad;
        int steps;          /* operations that run before the rows change */
        void *first, *then; /* NULL: the private stream */
    } cases[] = {
        {"cuLaunchKernel", 25, 0, stream, NULL},
        {"cuEventRecord", 50, 0, stream, NULL},
        {NULL, 100, 1, stream, NULL},
        {NULL, 200, 1, NULL, stream},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture f;
        sim.begin(SIM_LAZY, 1);
        fixture_init_padded(&f, cases[i].pad);
        if (cases[i].failing != NULL) {
            sim.fault(cases[i].failing, 1, 999, 1);
        }
        CHECK_EQ(launch_somewhere(f.table, cases[i].first), cases[i].failing != NULL ? MP_ERR_DEVICE : MP_OK);
        sim.step(cases[i].steps);
        for (int step = 0; step < 3; step++) {
            f.row.numel--;
            OK(set_rows(&f));
            OK(launch_somewhere(f.table, cases[i].then));
        }
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        OK(backend->synchronize(device, &error));
        expect_tables_ordered();
        fixture_fini(&f);
    }
}

/* Two streams that nobody ordered: the second's launch stands for the first's, so it does not end before that. */
static void
test_slot_in_use_by_two_streams_is_not_taken(void)
{
    fixture f;
    void *first = new_stream(), *second = new_stream();
    sim.begin(SIM_LAZY, 1);
    fixture_init_padded(&f, 400); /* alone in its queue */
    OK(backend->launch_on(f.table, 1.0, first, &error));
    OK(backend->launch_on(f.table, 1.0, second, &error));
    CHECK_EQ(sim.cuStreamSynchronize(second), 0);
    for (int step = 0; step < 3; step++) {
        f.row.numel--;
        OK(set_rows(&f));
        OK(backend->launch(f.table, 1.0, &error));
    }
    CHECK_EQ(sim.cuStreamSynchronize(first), 0);
    OK(backend->synchronize(device, &error));
    expect_tables_ordered();
    fixture_fini(&f);
}

/* Slots that go from a table used on one stream to a table used on another. */
static void
test_slots_change_streams(void)
{
    void *const streams[] = {new_stream(), new_stream()};
    for (int seed = 0; seed < 8; seed++) {
        fixture f[3];
        sim.begin(schedules[seed % 4], (uint64_t)seed);
        for (int i = 0; i < 3; i++) {
            fixture_init_padded(&f[i], 50);
        }
        for (int step = 0; step < 12; step++) {
            fixture *g = &f[(step + seed) % 3];
            g->row.numel = 8 + step;
            OK(set_rows(g));
            if (g == &f[2]) {
                OK(backend->launch(g->table, 1.0, &error));
            }
            else {
                OK(backend->launch_on(g->table, 1.0, streams[g == &f[1]], &error));
            }
        }
        CHECK_EQ(sim.cuStreamSynchronize(streams[0]), 0);
        CHECK_EQ(sim.cuStreamSynchronize(streams[1]), 0);
        OK(backend->synchronize(device, &error));
        expect_clean();
        for (int i = 0; i < 3; i++) {
            fixture_fini(&f[i]);
        }
    }
}

/* ---- Order ---- */

static void
one_step(fixture *f, void *stream, float value)
{
    mp_event *event;
    write_masters(f, stream, value);
    OK(backend->order_after(device, stream, &error));
    OK(backend->launch(f->table, 1.0, &error));
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_record(event, &error));
    OK(backend->event_wait(event, stream, &error));
    backend->event_put(event);
    CHECK_EQ(read_low(f, stream), value);
}

static void
test_step_is_ordered_and_cheap(void)
{
    fixture f;
    void *const streams[] = {new_stream(), NULL}; /* the legacy default stream too */
    fixture_init(&f);
    for (size_t s = 0; s < schedule_count; s++) {
        sim.begin(schedules[s], s);
        void *stream = streams[s % 2];
        one_step(&f, stream, 1.0f);
        one_step(&f, stream, 2.0f);
        const uint64_t allocations = sim.calls("cuMemAlloc") + sim.calls("cuMemHostAlloc") +
                                     sim.calls("cuEventCreate");
        const uint64_t launches = sim.calls("cuLaunchKernel"), records = sim.calls("cuEventRecord");
        const uint64_t waits = sim.calls("cuStreamWaitEvent"), copies = sim.calls("cuMemcpyHtoDAsync");
        one_step(&f, stream, 3.0f);
        CHECK_EQ(sim.calls("cuLaunchKernel") - launches, 1);
        CHECK_EQ(sim.calls("cuEventRecord") - records, 2);
        CHECK_EQ(sim.calls("cuStreamWaitEvent") - waits, 2);
        CHECK_EQ(sim.calls("cuMemcpyHtoDAsync") - copies, 0);
        CHECK_EQ(sim.calls("cuMemAlloc") + sim.calls("cuMemHostAlloc") + sim.calls("cuEventCreate"), allocations);
        CHECK_EQ(sim.blocking(), 0);
        expect_clean();
    }
    fixture_fini(&f);
}

/* The simulator would see a missing wait: without this the test above proves nothing. */
static void
test_missing_order_is_reported(void)
{
    fixture f;
    void *stream = new_stream();
    sim.begin(SIM_LAZY, 3);
    fixture_init(&f);
    write_masters(&f, stream, 1.0f);
    OK(backend->launch(f.table, 1.0, &error));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    CHECK(sim.report_count("RACE") > 0);
    sim.begin(SIM_LAZY, 3);
    fixture_fini(&f);
}

static void
test_context_and_mode_of_the_caller_are_restored(void)
{
    fixture f;
    void *before, *after;
    sim.begin(SIM_EAGER, 1);
    fixture_init(&f);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    one_step(&f, NULL, 1.0f);
    sim.fault("cuLaunchKernel", 1, 999, 1);
    CHECK_EQ(backend->launch(f.table, 1.0, &error), MP_ERR_DEVICE);
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->order_after(device, NULL, &error), MP_ERR_DEVICE);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
    int mode = 0;
    CHECK_EQ(sim.cuThreadExchangeStreamCaptureMode(&mode), 0);
    CHECK_EQ(mode, 0);
    fixture_fini(&f);
}

/* ---- Events ---- */

static void
test_event_states(void)
{
    fixture f;
    mp_event *event, *again;
    int done;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 1); /* never recorded */
    OK(backend->event_wait(event, NULL, &error));
    OK(backend->event_synchronize(event, &error));
    CHECK_EQ(sim.calls("cuStreamWaitEvent") + sim.calls("cuEventSynchronize"), 0);
    OK(backend->launch(f.table, 1.0, &error));
    OK(backend->event_record(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 0);
    OK(backend->event_synchronize(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 1);
    CHECK_EQ(f.low[2], 0x4000);
    CHECK(backend->event_native(event) != NULL);
    OK(backend->launch(f.table, 1.0, &error));
    OK(backend->event_record(event, &error));
    backend->event_put(event);
    backend->event_put(NULL);
    OK(backend->event_get(device, &again, &error));
    CHECK(again == event); /* pooled */
    OK(backend->event_query(again, &done, &error));
    CHECK_EQ(done, 1); /* what it recorded before is not its own */
    backend->event_put(again);
    fixture_fini(&f);
}

/* ---- Capture ---- */

static const char *const forbidden[] = {"cuMemAlloc",   "cuMemHostAlloc",       "cuMemFreeHost",      "cuEventQuery",
                                        "cuEventCreate", "cuEventSynchronize", "cuStreamSynchronize"};

static void
capture_step(fixture *f, void *stream, void **graph)
{
    mp_event *event;
    OK(backend->order_after(device, stream, &error));
    OK(backend->launch(f->table, 1.0, &error));
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_record(event, &error));
    OK(backend->event_wait(event, stream, &error));
    backend->event_put(event);
    OK(backend->launch_on(f->table, 1.0, stream, &error));
    CHECK_EQ(sim.cuStreamEndCapture(stream, graph), 0);
}

/* Steps whose rows change, so that slots are used again and again. */
static void
changing_steps(fixture *f, void *stream, int count)
{
    for (int step = 0; step < count; step++) {
        f->row.numel = COUNT - 1 - step % 50;
        OK(set_rows(f));
        OK(backend->order_after(device, stream, &error));
        OK(backend->launch_on(f->table, 1.0, stream, &error));
        OK(backend->order_after(device, stream, &error));
        OK(backend->launch(f->table, 1.0, &error));
        OK(backend->synchronize(device, &error));
    }
}

static void
replay(const fixture *f, void *exec, void *stream, float value)
{
    write_masters(f, stream, value);
    CHECK_EQ(sim.cuGraphLaunch(exec, stream), 0);
    CHECK_EQ(read_low(f, stream), value);
}

/* `moved`: the rows change under capture, as those of tensors that a graph allocates do. */
static void
capture_and_replay(int schedule, int moved)
{
    fixture f;
    void *stream = new_stream(), *graph = NULL, *exec = NULL;
    uint64_t before[sizeof forbidden / sizeof *forbidden];
    sim.begin(schedule, 7);
    fixture_init_padded(&f, 25);
    fixture g = f; /* as the graph sees it */
    one_step(&f, stream, 1.0f);
    uint16_t *elsewhere = device_memory(COUNT * sizeof *elsewhere, "graph memory");
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        before[i] = sim.calls(forbidden[i]);
    }
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 0), 0);
    if (moved) {
        g.low = g.row.dst = elsewhere;
        OK(set_rows(&g));
    }
    capture_step(&f, stream, &graph);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        CHECK_EQ(sim.calls(forbidden[i]), before[i]);
    }
    CHECK_EQ(sim.cuGraphInstantiate(&exec, graph, 0), 0);
    one_step(&g, stream, 2.0f); /* the same rows outside the graph, which has not run */
    replay(&g, exec, stream, 3.0f);
    changing_steps(&f, stream, 12); /* do not reach into the graph */
    replay(&g, exec, stream, 4.0f);
    expect_clean();
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    release(elsewhere);
    fixture_fini(&f);
}

/* A table that is sent outside a capture while the private stream is part of one. */
static void
test_capture_is_unharmed_by_other_streams(void)
{
    fixture f, other, third;
    void *stream = new_stream(), *free_stream = new_stream(), *graph = NULL;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    OK(backend->launch(f.table, 1.0, &error));
    fixture_init_padded(&other, 100);
    fixture_init_padded(&third, 50);
    for (int i = 0; i < 2; i++) { /* one slot each in the queue: the private stream's last reads, a caller's */
        OK(backend->launch(other.table, 1.0, &error));
        OK(backend->launch_on(third.table, 1.0, free_stream, &error));
        other.row.numel--;
        third.row.numel--;
        OK(set_rows(&other));
        OK(set_rows(&third));
    }
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(free_stream), 0);
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 1), 0); /* forbids this thread to ask and allocate */
    OK(backend->order_after(device, stream, &error));
    OK(backend->launch_on(other.table, 1.0, free_stream, &error));
    OK(backend->launch_on(third.table, 1.0, free_stream, &error));
    capture_step(&f, stream, &graph);
    CHECK_EQ(sim.cuStreamSynchronize(free_stream), 0);
    expect_clean();
    fixture_fini(&third);
    fixture_fini(&other);
    fixture_fini(&f);
}

/* Tables that keep changing under capture use up the reserve; the next step outside makes a new one. */
static void
test_capture_of_too_many_tables_is_refused(void)
{
    fixture f, settled;
    void *stream = new_stream(), *graph = NULL;
    int launches = 0;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    fixture_init(&settled);
    for (int i = 0; i < 2; i++) {
        OK(backend->launch(settled.table, 1.0, &error));
        OK(backend->synchronize(device, &error));
    }
    for (int turn = 0; turn < 2; turn++) {
        CHECK_EQ(sim.cuStreamBeginCapture(stream, 0), 0);
        mp_status status = MP_OK;
        for (launches = 0; status == MP_OK && launches < 4000; launches++) {
            f.row.numel = 1 + launches;
            OK(backend->table_set(f.table, &f.row, 1, &error));
            status = backend->launch_on(f.table, 1.0, stream, &error);
        }
        CHECK_EQ(status, MP_ERR_DEVICE);
        CHECK(launches > 1000);
        CHECK(strstr(error.text, "run one warm-up step") != NULL);
        CHECK_EQ(sim.cuStreamEndCapture(stream, &graph), 0); /* the capture itself is unharmed */
        OK(backend->launch(settled.table, 1.0, &error)); /* even one that has nothing to send */
        OK(backend->synchronize(device, &error));
    }
    expect_clean();
    fixture_fini(&settled);
    fixture_fini(&f);
}

/* ---- Threads ---- */

#define THREADS 4

static void *
thread_main(void *argument)
{
    fixture *f = argument;
    void *stream = backend->native_stream(device); /* of its own: what is shared here is the device */
    for (int step = 0; step < 40; step++) {
        mp_event *event;
        mp_error mine;
        mp_status status = MP_OK;
        f->row.numel = COUNT - step % 3;
        status |= backend->table_set(f->table, &f->row, 1, &mine);
        status |= backend->order_after(device, stream, &mine);
        status |= backend->launch(f->table, 1.0, &mine);
        status |= backend->event_get(device, &event, &mine);
        status |= backend->event_record(event, &mine);
        status |= backend->event_wait(event, stream, &mine);
        status |= backend->launch_on(f->table, 1.0, stream, &mine);
        status |= backend->event_synchronize(event, &mine);
        backend->event_put(event);
        if (status != MP_OK || f->low[2] != 0x4000) {
            return f;
        }
    }
    return NULL;
}

static void
test_threads_share_a_device(void)
{
    pthread_t threads[THREADS];
    fixture f[THREADS];
    sim.begin(SIM_THREAD, 1);
    for (int i = 0; i < THREADS; i++) {
        fixture_init(&f[i]);
        CHECK_EQ(pthread_create(&threads[i], NULL, thread_main, &f[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *failed;
        CHECK_EQ(pthread_join(threads[i], &failed), 0);
        CHECK(failed == NULL);
    }
    for (int i = 0; i < THREADS; i++) {
        fixture_fini(&f[i]);
    }
    expect_clean();
}

/* ---- Failure ---- */

/* A step with changed rows; stops at the first failure. */
static mp_status
try_step(fixture *f, void *stream, int64_t numel)
{
    mp_event *event = NULL;
    f->row.numel = numel;
    mp_status status = backend->table_set(f->table, &f->row, 1, &error);
    if (status != MP_OK || (status = backend->order_after(device, stream, &error)) != MP_OK ||
        (status = backend->launch(f->table, 1.0, &error)) != MP_OK ||
        (status = backend->event_get(device, &event, &error)) != MP_OK) {
        return status;
    }
    if ((status = backend->event_record(event, &error)) == MP_OK &&
        (status = backend->event_wait(event, stream, &error)) == MP_OK) {
        status = backend->launch_on(f->table, 1.0, stream, &error);
    }
    backend->event_put(event);
    return status;
}

/* Each call of a step fails once: it is told, and the steps after it are right. */
static void
test_step_survives_every_fault(void)
{
    fixture f;
    void *stream = new_stream();
    uint64_t nth = 1;
    for (mp_status status = MP_ERR_DEVICE; status != MP_OK && nth < 300; nth++) {
        sim.begin(SIM_RANDOM, nth);
        fixture_init(&f);
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 999, 1);
        status = try_step(&f, stream, COUNT);
        if (status != MP_OK) {
            CHECK(strstr(error.text, "(999)") != NULL && strstr(error.text, ", device 0") != NULL);
        }
        else {
            expect_fault_to_come("*", nth, calls);
        }
        sim.begin(SIM_RANDOM, nth); /* waits for everything: a failed step leaves its streams unordered */
        for (int step = 0; step < 3; step++) {
            one_step(&f, stream, (float)step);
        }
        OK(try_step(&f, stream, COUNT - 1));
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        expect_clean();
        fixture_fini(&f);
    }
    CHECK(nth > 20 && nth < 300);
}

/* The copy was queued; the launch, or what would tell the end of the copy, was not.  The rows change again at once. */
static void
test_failure_after_the_copy_keeps_the_slot(void)
{
    fixture f;
    void *stream = new_stream();
    for (int turn = 0; turn < 8; turn++) {
        const char *failing = turn & 1 ? "cuLaunchKernel" : "cuEventRecord";
        sim.begin(turn & 4 ? SIM_LAZY : SIM_RANDOM, (uint64_t)turn);
        fixture_init_padded(&f, 50);
        for (int step = 0; step < 6; step++) {
            f.row.numel = 100 + step;
            OK(set_rows(&f));
            sim.fault(failing, 1, 999, 1);
            const mp_status status =
                turn & 2 ? backend->launch(f.table, 1.0, &error) : backend->launch_on(f.table, 1.0, stream, &error);
            CHECK_EQ(status, MP_ERR_DEVICE);
            CHECK(strncmp(error.text, failing, 13) == 0);
        }
        OK(backend->order_after(device, stream, &error));
        OK(backend->launch(f.table, 1.0, &error));
        OK(backend->synchronize(device, &error));
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        expect_clean();
        fixture_fini(&f);
    }
}

/* A launch reads the slot, and what would tell its end was not recorded, although an event after an earlier launch is
 * over.  Where callers order nothing after it, only their values may be wrong: no other rows may be sent to the slot. */
static void
test_failure_after_the_launch_keeps_the_slot(void)
{
    fixture f, other;
    void *stream = new_stream();
    sim.begin(SIM_LAZY, 1);
    fixture_init_padded(&f, 400);
    fixture_init_padded(&other, 400);
    OK(backend->launch_on(f.table, 1.0, stream, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->launch_on(f.table, 1.0, stream, &error), MP_ERR_DEVICE);
    backend->table_free(f.table);
    for (int i = 0; i < 40; i++) { /* takes every slot of this size that is idle */
        other.row.numel = COUNT - i;
        OK(set_rows(&other));
        OK(backend->launch(other.table, 1.0, &error));
    }
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    OK(backend->synchronize(device, &error));
    expect_clean();
    OK(backend->table_new(device, &f.table, &error));
    fixture_fini(&f);
    fixture_fini(&other);
}

/* ---- Failure of single entries ---- */

/* Empties the pool of events: the next one is made anew.  At most so many are in it. */
enum { POOL = 256 };

static size_t
drain_events(mp_event **taken)
{
    size_t count = 0;
    const uint64_t created = sim.calls("cuEventCreate");
    while (sim.calls("cuEventCreate") == created && count < POOL) {
        OK(backend->event_get(device, &taken[count++], &error));
    }
    CHECK(count < POOL);
    return count;
}

typedef struct attempt {
    fixture *f;
    mp_event *event; /* recorded, pending */
    void *stream, *other;
} attempt;

static mp_status
try_record(attempt *a)
{
    return backend->event_record(a->event, &error);
}

static mp_status
try_wait(attempt *a)
{
    return backend->event_wait(a->event, a->stream, &error);
}

static mp_status
try_query(attempt *a)
{
    int done = 1;
    const mp_status status = backend->event_query(a->event, &done, &error);
    CHECK(status == MP_OK || !done);
    return status;
}

static mp_status
try_event_synchronize(attempt *a)
{
    return backend->event_synchronize(a->event, &error);
}

static mp_status
try_synchronize(attempt *a)
{
    (void)a;
    return backend->synchronize(device, &error);
}

static mp_status
try_order(attempt *a)
{
    return backend->order_after(device, a->stream, &error);
}

static mp_status
try_launch(attempt *a)
{
    return backend->launch(a->f->table, 1.0, &error);
}

/* From stream to stream: what each waits for is ordered by hand, so that only the table's own order is left to it. */
static mp_status
try_streams_in_turn(attempt *a)
{
    mp_status status;
    a->f->pad ^= 1;
    OK(set_rows(a->f));
    if ((status = backend->launch_on(a->f->table, 1.0, a->stream, &error)) != MP_OK ||
        (status = backend->order_after(device, a->stream, &error)) != MP_OK ||
        (status = backend->launch(a->f->table, 1.0, &error)) != MP_OK ||
        (status = backend->event_record(a->event, &error)) != MP_OK ||
        (status = backend->event_wait(a->event, a->other, &error)) != MP_OK ||
        (status = backend->launch_on(a->f->table, 1.0, a->other, &error)) != MP_OK ||
        (status = backend->order_after(device, a->other, &error)) != MP_OK) {
        return status;
    }
    return backend->launch(a->f->table, 1.0, &error);
}

static mp_status
try_changed_launch_on(attempt *a)
{
    a->f->pad ^= 1;
    OK(set_rows(a->f));
    return backend->launch_on(a->f->table, 1.0, a->stream, &error);
}

/* As after a capture that used the reserve up; what it held is left to the end of the program. */
static mp_status
try_launch_without_reserve(attempt *a)
{
    device->reserve = (mp_slab){NULL, 0, 0};
    return try_changed_launch_on(a);
}

static uint64_t
succeeded(const char *call, mp_status status)
{
    const int failed = status != MP_OK && strncmp(error.text, call, strlen(call)) == 0;
    return sim.calls(call) - (failed ? 1 : 0);
}

/* What did not happen is not counted. */
static void
expect_counted(const mp_counters *before, mp_status status, int single)
{
    mp_counters after;
    backend->counters(device, &after);
    CHECK_EQ(after.launches - before->launches, succeeded("cuLaunchKernel", status));
    CHECK_EQ(after.uploads - before->uploads, succeeded("cuMemcpyHtoDAsync", status));
    if (status != MP_OK && single) {
        CHECK_EQ(after.events, before->events);
        CHECK_EQ(after.waits, before->waits);
    }
}

/* Fails the nth call of a function that an entry makes: it is told by name, the caller's context is current again,
 * nothing stays.  0 when the entry made fewer. */
static int
fail_entry(attempt *a, mp_status (*entry)(attempt *), const char *function, uint64_t nth)
{
    const int makes_slots = entry == try_changed_launch_on || entry == try_launch_without_reserve;
    const int several = entry == try_streams_in_turn;
    mp_counters counted;
    void *before, *after;
    sim.begin(SIM_LAZY, nth);
    OK(backend->launch(a->f->table, 1.0, &error));
    OK(backend->event_record(a->event, &error));
    const int events = sim.live("events");
    sim.begin(SIM_LAZY, nth); /* counts calls from here; what was launched is over */
    OK(backend->event_record(a->event, &error));
    backend->counters(device, &counted);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    const uint64_t calls = sim.calls(function);
    sim.fault(function, nth, 719, 1);
    const mp_status status = entry(a);
    expect_counted(&counted, status, !several);
    if (status != MP_OK) {
        CHECK_EQ(status, MP_ERR_DEVICE);
        CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
        CHECK(strncmp(error.text, "cu", 2) == 0 && strstr(error.text, ", device 0") != NULL);
        CHECK(makes_slots || several || sim.live("events") == events);
    }
    else {
        expect_fault_to_come(function, nth, calls);
    }
    sim.begin(SIM_LAZY, nth);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
    one_step(a->f, a->stream, (float)nth);
    expect_clean();
    return status != MP_OK;
}

/* Each call of each entry fails once, and once more function by function: which call is the nth of all depends on the
 * slots that are idle. */
static void
test_every_entry_survives_every_fault(void)
{
    mp_status (*const entries[])(attempt *) = {
        try_record, try_wait, try_query, try_event_synchronize, try_synchronize,
        try_order, try_launch, try_changed_launch_on, try_launch_without_reserve, try_streams_in_turn,
    };
    const char *const functions[] = {"*", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery"};
    fixture f;
    attempt a = {&f, NULL, new_stream(), new_stream()};
    static mp_event *taken[POOL];
    sim.begin(SIM_LAZY, 1);
    fixture_init_padded(&f, 1);
    const size_t count = drain_events(taken);
    a.event = taken[count - 1];
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        for (size_t j = 0; j < sizeof functions / sizeof *functions; j++) {
            uint64_t nth = 1;
            while (fail_entry(&a, entries[i], functions[j], nth) && nth < 60) {
                nth++;
            }
            CHECK(nth < 60);
            CHECK(j > 0 || nth >= 4); /* entering, the call, leaving; and a turn without a fault */
        }
    }
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    fixture_fini(&f);
}

/* An event is not the caller's before it is whole, so that the pool never holds one that does not exist. */
static void
test_event_that_was_not_made_is_not_kept(void)
{
    static mp_event *taken[POOL];
    mp_event *event;
    sim.begin(SIM_LAZY, 1);
    size_t count = drain_events(taken);
    const int events = sim.live("events");
    static const char *const failing[] = {"cuCtxPushCurrent", "cuEventCreate", "cuCtxPopCurrent"};
    for (size_t i = 0; i < 3; i++) {
        sim.fault(failing[i], 1, 999, 1);
        CHECK_EQ(backend->event_get(device, &event, &error), MP_ERR_DEVICE);
        CHECK(strncmp(error.text, failing[i], strlen(failing[i])) == 0);
        CHECK(event == NULL);
        CHECK_EQ(sim.live("events"), events);
        CHECK_EQ(sim.calls("cuEventDestroy"), i == 2); /* what was made, and nothing else */
        if (i == 2) { /* leaving failed: the device's context is still on the stack */
            void *popped;
            CHECK_EQ(sim.cuCtxPopCurrent(&popped), 0);
        }
    }
    sim.begin(SIM_LAZY, 1);
    const size_t pooled = count;
    OK(backend->event_get(device, &taken[count++], &error));
    CHECK(pooled < POOL);
    sim.fault("cuEventCreate", 1, 999, 1);
    CHECK_EQ(backend->order_after(device, NULL, &error), MP_ERR_DEVICE);
    /* A record that failed is none: there is nothing to wait for. */
    int done = 0;
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->event_record(taken[count - 1], &error), MP_ERR_DEVICE);
    OK(backend->event_query(taken[count - 1], &done, &error));
    CHECK_EQ(done, 1);
    OK(backend->event_wait(taken[count - 1], NULL, &error));
    OK(backend->event_synchronize(taken[count - 1], &error));
    CHECK_EQ(sim.calls("cuEventQuery") + sim.calls("cuStreamWaitEvent") + sim.calls("cuEventSynchronize"), 0);
    OK(backend->event_record(taken[count - 1], &error));
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    expect_clean();
}

/* A slot that must be made: with slabs and reserve in each state, larger than a slab too.  Nothing made is lost. */
static void
try_slot(size_t bytes, int slab_full, int without_reserve)
{
    const mp_slab slab = device->slab, reserve = device->reserve;
    mp_status status = MP_ERR_DEVICE;
    uint64_t nth = 1;
    for (; status != MP_OK && nth < 30; nth++) {
        mp_slot *slot = NULL;
        sim.begin(SIM_LAZY, nth);
        device->slab = slab;
        device->reserve = reserve;
        if (slab_full) {
            device->slab.left = 0;
        }
        if (without_reserve) {
            device->reserve = (mp_slab){NULL, 0, 0};
        }
        OK(mp_cuda_enter(device, &error));
        const int events = sim.live("events"), memory = sim.live("device"), pinned = sim.live("pinned");
        const size_t left = device->slab.left;
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 719, 1);
        status = mp_slot_take(device, bytes, &slot, &error);
        const int made = without_reserve && device->reserve.left > 0; /* stays, and is not lost */
        if (status != MP_OK) {
            CHECK_EQ(status, MP_ERR_DEVICE);
            CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
            CHECK(slot == NULL);
            CHECK(device->slab.left == left || device->slab.left == reserve.left); /* nothing was cut */
            CHECK_EQ(sim.live("events"), events);
            CHECK(sim.live("device") - memory <= made + slab_full);
            CHECK_EQ(sim.live("device") - memory, sim.live("pinned") - pinned);
        }
        else {
            CHECK(slot != NULL && slot->bytes >= bytes && slot->memory != 0 && slot->staging != NULL);
            expect_fault_to_come("*", nth, calls);
        }
        sim.begin(SIM_LAZY, nth);
        OK(mp_cuda_leave(device, MP_OK, &error));
        mp_slot_give(device, slot);
    }
    CHECK(nth >= 4 && nth < 30);
    OK(mp_cuda_enter(device, &error));
    OK(mp_slot_reserve(device, &error));
    OK(mp_cuda_leave(device, MP_OK, &error));
}

static void
test_slot_take_survives_every_fault(void)
{
    try_slot(70000, 0, 0);
    try_slot(140000, 1, 0);
    try_slot(280000, 1, 1);
    try_slot(1500000, 0, 0);
    try_slot(3000000, 0, 1);
}

/* Rows that change while nothing is pending: slots are used again, and none is made. */
static void
test_slots_are_used_again(void)
{
    fixture f;
    void *stream = new_stream();
    sim.begin(SIM_EAGER, 1);
    fixture_init_padded(&f, 1);
    changing_steps(&f, stream, 6);
    const uint64_t made = sim.calls("cuEventCreate");
    changing_steps(&f, stream, 60);
    CHECK_EQ(sim.calls("cuEventCreate"), made);
    expect_clean();
    fixture_fini(&f);
}

/* Each call under capture fails once: it is told, and the capture can be ended. */
static void
test_capture_survives_every_fault(void)
{
    for (int moved = 0; moved < 2; moved++) {
        mp_status status = MP_ERR_DEVICE;
        uint64_t nth = 1;
        for (; status != MP_OK && nth < 50; nth++) {
            fixture f;
            void *stream = new_stream(), *graph = NULL;
            sim.begin(SIM_LAZY, nth);
            fixture_init_padded(&f, 25);
            one_step(&f, stream, 1.0f);
            OK(backend->synchronize(device, &error));
            CHECK_EQ(sim.cuStreamBeginCapture(stream, 2), 0);
            if (moved) {
                f.row.numel--;
                OK(set_rows(&f));
            }
            const uint64_t calls = sim.calls("*");
            sim.fault("*", nth, 719, 1);
            status = backend->launch_on(f.table, 1.0, stream, &error);
            if (status == MP_OK) {
                status = backend->launch_on(f.table, 2.0, stream, &error); /* the copy is made once more */
            }
            if (status != MP_OK) {
                CHECK_EQ(status, MP_ERR_DEVICE);
                CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
            }
            else {
                expect_fault_to_come("*", nth, calls);
            }
            void *context;
            for (int i = 0; status == MP_OK && i < 50 && sim.cuCtxGetCurrent(&context) == 0; i++) {
                /* The fault is for a later call: not for one of what follows. */
            }
            CHECK_EQ(sim.cuStreamEndCapture(stream, &graph), 0);
            sim.begin(SIM_LAZY, nth);
            f.row.numel = COUNT;
            OK(set_rows(&f));
            one_step(&f, stream, (float)nth);
            expect_clean();
            CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
            fixture_fini(&f);
        }
        CHECK(nth >= 6 && nth < 50);
    }
}

/* ---- Out of host memory ---- */

static atomic_long freed; /* blocks, by what is linked here */

void __real_free(void *block);
void __wrap_free(void *block);

void
__wrap_free(void *block)
{
    atomic_fetch_add(&freed, block != NULL);
    __real_free(block);
}

static void
expect_out_of_memory(mp_status status)
{
    CHECK_EQ(status, MP_ERR_MEMORY);
    CHECK(strncmp(error.text, "out of memory for ", 18) == 0);
}

static void
test_open_without_memory_is_told(void)
{
    mp_device *opened;
    sim.begin(SIM_EAGER, 1);
    malloc_fails_at(1);
    expect_out_of_memory(backend->open(0, &opened, &error));
    malloc_fails_at(0);
    CHECK(opened == NULL);
    CHECK_EQ(sim.live("contexts"), 0);
}

static void
test_out_of_memory_leaves_things_as_they_were(void)
{
    fixture f;
    static mp_event *taken[POOL];
    static mp_row rows[9];
    mp_event *event;
    mp_table *table;
    void *stream = new_stream(), *graph = NULL;
    sim.begin(SIM_LAZY, 1);
    fixture_init_padded(&f, 0);
    const size_t count = drain_events(taken);
    malloc_fails_at(1);
    expect_out_of_memory(backend->event_get(device, &event, &error));
    CHECK(event == NULL);
    malloc_fails_at(1);
    expect_out_of_memory(backend->table_new(device, &table, &error));
    CHECK(table == NULL);
    for (size_t i = 0; i < 9; i++) {
        rows[i] = f.row;
        rows[i].numel = 1;
    }
    for (long nth = 1; nth <= 2; nth++) {
        malloc_fails_at(nth);
        expect_out_of_memory(backend->table_set(f.table, rows, 9, &error)); /* more rows than ever */
        malloc_fails_at(0);
        one_step(&f, stream, (float)nth); /* the row is still the old one */
    }
    f.row.numel--;
    OK(set_rows(&f));
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 0), 0);
    /* No memory of the device either: what was made for the slot is freed. */
    const mp_slab slab = device->slab, reserve = device->reserve;
    device->slab.left = device->reserve.left = 0;
    const long before = atomic_load(&freed);
    CHECK_EQ(backend->launch_on(f.table, 1.0, stream, &error), MP_ERR_DEVICE);
    CHECK(strstr(error.text, "run one warm-up step") != NULL);
    CHECK_EQ(atomic_load(&freed) - before, 1);
    device->slab = slab;
    device->reserve = reserve;
    malloc_fails_at(1);
    expect_out_of_memory(backend->launch_on(f.table, 1.0, stream, &error));
    malloc_fails_at(0);
    CHECK_EQ(sim.cuStreamEndCapture(stream, &graph), 0);
    OK(backend->launch_on(f.table, 1.0, stream, &error));
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    expect_clean();
    fixture_fini(&f);
}

/* A table whose size no slot in the queue has, so that one must be made, and a device whose slabs are full. */
static void
test_slot_without_memory_is_told(void)
{
    fixture f;
    void *stream = new_stream();
    sim.begin(SIM_LAZY, 1);
    fixture_init_padded(&f, 350);
    const int events = sim.live("events");
    malloc_fails_at(1);
    const mp_status status = backend->launch_on(f.table, 1.0, stream, &error);
    malloc_fails_at(0);
    if (status != MP_OK) { /* else a slot of this size was there */
        expect_out_of_memory(status);
        CHECK_EQ(sim.live("events"), events);
    }
    OK(backend->launch_on(f.table, 1.0, stream, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    expect_clean();
    fixture_fini(&f);
}

static void
test_fork_is_refused(void)
{
    fixture f;
    mp_event *event;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    OK(backend->event_get(device, &event, &error));
    const pid_t child = fork();
    if (child == 0) {
        mp_device *other;
        mp_table *table;
        mp_event *mine;
        int done;
        const int refused = backend->launch(f.table, 1.0, &error) == MP_ERR_FORKED &&
                            backend->event_get(device, &mine, &error) == MP_ERR_FORKED && mine == NULL &&
                            backend->event_record(event, &error) == MP_ERR_FORKED &&
                            backend->event_synchronize(event, &error) == MP_ERR_FORKED &&
                            backend->launch_on(f.table, 1.0, NULL, &error) == MP_ERR_FORKED &&
                            set_rows(&f) == MP_ERR_FORKED &&
                            backend->open(0, &other, &error) == MP_ERR_FORKED &&
                            backend->order_after(device, NULL, &error) == MP_ERR_FORKED &&
                            backend->event_query(event, &done, &error) == MP_ERR_FORKED &&
                            backend->event_wait(event, NULL, &error) == MP_ERR_FORKED &&
                            backend->table_new(device, &table, &error) == MP_ERR_FORKED &&
                            backend->synchronize(device, &error) == MP_ERR_FORKED &&
                            strstr(error.text, "fork") != NULL;
        backend->event_put(event);
        backend->table_free(f.table);
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(sim.forked_calls(), 0);
    backend->event_put(event);
    fixture_fini(&f);
}

/* Last: a device fault is there to stay. */
static void
test_device_fault_is_told(void)
{
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    sim.fault_kernel(1, 700);
    OK(backend->launch(f.table, 1.0, &error));
    CHECK_EQ(backend->synchronize(device, &error), MP_ERR_DEVICE);
    CHECK(strncmp(error.text, "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): ", 62) == 0);
    CHECK(strstr(error.text, ", device 0") != NULL);
    backend->table_free(f.table);
    release(f.master);
    release(f.low);
    release(f.padding);
}

static void
test_all(void)
{
    sim.set_devices("90,75");
    test_initialisation_survives_every_fault();
    test_open_without_image_says_so();
    test_open_without_memory_is_told();
    test_open_tries_the_next_image();
    test_open_refuses_an_old_device();
    test_open_refuses_a_device_that_the_kernel_does_not_fit();
    test_open_survives_every_fault();
    test_open_finds_devices();
    mp_device *second;
    OK(backend->open(1, &second, &error));
    test_slot_without_memory_is_told(); /* first: these need an empty queue */
    test_slot_in_use_is_not_taken();
    test_slot_in_use_by_two_streams_is_not_taken();
    test_launch_converts_as_the_host(device, 60);
    test_launch_converts_as_the_host(second, 60);
    test_table_empty_launches_nothing();
    test_table_set_refuses_bad_rows();
    test_launch_sends_only_changed_rows();
    test_table_changes_while_work_is_pending();
    test_table_sent_on_one_stream_is_ready_on_others();
    test_table_is_ordered_where_callers_forget();
    test_slots_change_streams();
    test_step_is_ordered_and_cheap();
    test_missing_order_is_reported();
    test_context_and_mode_of_the_caller_are_restored();
    test_event_states();
    for (size_t i = 0; i < schedule_count; i++) {
        capture_and_replay(schedules[i], 0);
        capture_and_replay(schedules[i], 1);
    }
    test_capture_is_unharmed_by_other_streams();
    test_capture_of_too_many_tables_is_refused();
    test_threads_share_a_device();
    test_step_survives_every_fault();
    test_failure_after_the_copy_keeps_the_slot();
    test_failure_after_the_launch_keeps_the_slot();
    test_every_entry_survives_every_fault();
    test_slot_take_survives_every_fault();
    test_slots_are_used_again();
    test_capture_survives_every_fault();
    test_event_that_was_not_made_is_not_kept();
    test_out_of_memory_leaves_things_as_they_were();
    test_fork_is_refused();
    test_device_fault_is_told();
}

static void
test_convert(const char *note)
{
    char text[256];
    OK(backend->open(0, &device, &error));
    mp_cuda_status(text, sizeof text);
    CHECK(strstr(text, note) != NULL);
    fprintf(stderr, "%s\n", text);
    if (device != NULL) {
        test_launch_converts_as_the_host(device, 40);
    }
}

static void
test_refuse(const char *why)
{
    CHECK(backend->open(0, &device, &error) != MP_OK);
    CHECK(strstr(error.text, why) != NULL);
    fprintf(stderr, "%s\n", error.text);
}

int
main(int argc, char **argv)
{
    const char *library = getenv("DDP_MP_SIMCUDA"), *image = getenv("DDP_MP_IMAGE");
    if (library == NULL || image == NULL) {
        test_open_without_driver_says_so();
        return check_status();
    }
    load_simulator(library);
    load_image(image);
    if (argc == 2 && strcmp(argv[1], "threads") == 0) {
        OK(backend->open(0, &device, &error));
        test_threads_share_a_device();
    }
    else if (argc == 3 && strcmp(argv[1], "convert") == 0) {
        test_convert(argv[2]);
    }
    else if (argc == 3 && strcmp(argv[1], "refuse") == 0) {
        test_refuse(argv[2]);
    }
    else {
        test_all();
    }
    return check_status();
}
