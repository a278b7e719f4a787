/* Tests of the CUDA backend, against the simulated driver of tests/simulator: opening and its failures, conversion bit
 * for bit, long lists of rows, order between streams, events, capture, faults, fork.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc -Itests/kit/c -Itests/simulator tests/cuda/c/test_cuda.c csrc/core/backend.c csrc/core/row.c csrc/cuda/backend.c csrc/cuda/device.c csrc/cuda/driver.c csrc/cuda/image.c csrc/cuda/launch.c csrc/cuda/nvrtc.c csrc/host/convert.c csrc/host/convert_scalar.c csrc/host/convert_avx2.c csrc/host/convert_avx512.c csrc/host/convert_neon.c -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -ldl -lm -o test_cuda
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
#include "cuda/launch.h"
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

/* A float32 -> bfloat16 row, the values that it reads and where they go. */
#define COUNT 3000
typedef struct fixture {
    float *master;
    uint16_t *low;
    mp_row row; /* which tests change */
} fixture;

static void
fixture_init(fixture *f)
{
    f->master = device_memory(COUNT * sizeof *f->master, "master");
    f->low = device_memory(COUNT * sizeof *f->low, "low");
    for (int i = 0; i < COUNT; i++) {
        f->master[i] = (float)i;
    }
    f->row = (mp_row){f->master, NULL, f->low, COUNT, MP_F32, MP_F32, MP_BF16};
}

static void
fixture_fini(fixture *f)
{
    OK(backend->synchronize(device, &error));
    release(f->master);
    release(f->low);
}

static mp_status
launch(const fixture *f)
{
    return backend->launch(device, &f->row, 1, 1.0, &error);
}

static mp_status
launch_on(const fixture *f, void *stream)
{
    return backend->launch_on(device, &f->row, 1, 1.0, stream, &error);
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
        if (nth > 200) {
            CHECK(nth <= 200);
            break;
        }
    }
    CHECK(faults >= 12);
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

enum { MOST_ROWS = MP_CUDA_ROWS + 12 };

static void
test_launch_converts_as_the_host(mp_device *on, int rounds)
{
    static const double divisors[] = {1,    1,       2,       3,        1024,    0.5,      -4,       7, 0.1,
                                      1e30, 8,       0x1p130, 0x1p-140, 0x1p126, 0x1p-126, -0x1p125};
    static trial trials[MOST_ROWS];
    static mp_row rows[MOST_ROWS];
    for (int round = 0; round < rounds; round++) {
        sim.begin(schedules[round % 4], (uint64_t)round);
        const size_t count = round % 20 == 19 ? MOST_ROWS : 1 + next() % 12; /* in two launches, and in one */
        const double divisor = divisors[next() % (sizeof divisors / sizeof *divisors)];
        for (size_t i = 0; i < count; i++) {
            trial_init(&trials[i]);
            sim.disown(trials[i].src), sim.own(trials[i].src, trials[i].room, "src", -1);
            sim.disown(trials[i].add), sim.own(trials[i].add, trials[i].room, "add", -1);
            sim.disown(trials[i].dst), sim.own(trials[i].dst, trials[i].room, "dst", -1);
            rows[i] = trials[i].row;
        }
        if (round % 2 == 0) {
            OK(backend->launch(on, rows, count, divisor, &error));
        }
        else {
            OK(backend->launch_on(on, rows, count, divisor, backend->native_stream(on), &error));
        }
        memset(rows, 0xff, count * sizeof *rows); /* borrowed for the call only */
        OK(backend->synchronize(on, &error));
        expect_clean();
        for (size_t i = 0; i < count; i++) {
            trial_check(&trials[i], divisor);
        }
    }
}

static void
test_launch_without_elements_calls_nothing(void)
{
    const mp_row empty[] = {{NULL, NULL, NULL, 0, MP_F32, MP_F32, MP_BF16},
                            {NULL, NULL, NULL, 0, MP_F64, MP_F64, MP_F16}};
    sim.begin(SIM_LAZY, 1);
    OK(backend->launch(device, NULL, 0, 1.0, &error));
    OK(backend->launch_on(device, NULL, 0, 1.0, NULL, &error));
    OK(backend->launch(device, empty, 2, 2.0, &error));
    CHECK_EQ(sim.calls("cuLaunchKernel"), 0);
}

static void
test_launch_refuses_bad_rows(void)
{
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const struct {
        mp_row row;
        const char *text;
    } cases[] = {
        {{f.master, NULL, f.low, -1, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, f.low, INT64_MAX, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, f.low, (int64_t)1 << 38, MP_F32, MP_F32, MP_BF16}, "row 1: numel is negative or too large"},
        {{f.master, NULL, NULL, 8, MP_F32, MP_F32, MP_BF16}, "row 1: dst is NULL"},
        {{f.master, NULL, f.low, 8, MP_DTYPE_NONE, MP_F32, MP_BF16}, "row 1: src has an unknown type"},
        {{f.master, f.master, f.low, 8, MP_F32, MP_NDTYPE, MP_BF16}, "row 1: add has an unknown type"},
        {{f.master, NULL, f.low, 8, MP_F32, MP_F32, MP_NDTYPE}, "row 1: dst has an unknown type"},
        {{(char *)f.master + 2, NULL, f.low, 8, MP_F32, MP_F32, MP_BF16}, "row 1: src is not aligned to its elements"},
        {{NULL, (char *)f.master + 1, f.low, 8, MP_F32, MP_F16, MP_BF16}, "row 1: add is not aligned to its elements"},
        {{f.master, NULL, (char *)f.low + 1, 8, MP_F32, MP_F32, MP_BF16}, "row 1: dst is not aligned to its elements"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const mp_row rows[] = {f.row, cases[i].row};
        CHECK_EQ(backend->launch(device, rows, 2, 1.0, &error), MP_ERR_ARGUMENT);
        CHECK_STR_EQ(error.text, cases[i].text);
        CHECK_EQ(backend->launch_on(device, rows, 2, 1.0, NULL, &error), MP_ERR_ARGUMENT);
    }
    CHECK_EQ(backend->launch(device, NULL, 3, 1.0, &error), MP_ERR_ARGUMENT);
    CHECK_EQ(sim.calls("*"), 0); /* of what is refused nothing is launched */
    OK(launch(&f));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(f.low[1], 0x3f80);
    fixture_fini(&f);
}

/* ---- Lists of rows ---- */

/* As many launches as the arguments of a kernel need, and nothing but launches. */
static void
test_long_lists_take_several_launches(void)
{
    const struct {
        size_t rows, launches;
    } cases[] = {{1, 1}, {MP_CUDA_ROWS, 1}, {MP_CUDA_ROWS + 1, 2}, {2 * MP_CUDA_ROWS, 2}, {2 * MP_CUDA_ROWS + 1, 3}};
    fixture f;
    mp_counters before, after;
    void *stream = new_stream();
    static mp_row rows[2 * (2 * MP_CUDA_ROWS + 1)];
    fixture_init(&f);
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        const size_t count = cases[i / 2].rows, launches = cases[i / 2].launches;
        sim.begin(SIM_LAZY, i);
        for (size_t j = 0; j < count; j++) {
            rows[2 * j] = (mp_row){NULL, NULL, NULL, 0, MP_F32, MP_F32, MP_F32}; /* takes no room */
            rows[2 * j + 1] = (mp_row){f.master + 3 * j, NULL, f.low + 3 * j, 3, MP_F32, MP_F32, MP_BF16};
        }
        memset(f.low, 0, COUNT * sizeof *f.low);
        backend->counters(device, &before);
        OK(i % 2 ? backend->launch_on(device, rows, 2 * count, 1.0, stream, &error)
                 : backend->launch(device, rows, 2 * count, 1.0, &error));
        backend->counters(device, &after);
        CHECK_EQ(sim.calls("cuLaunchKernel"), launches);
        CHECK_EQ(sim.calls("*"), launches + 2); /* and the context */
        CHECK_EQ(after.launches - before.launches, launches);
        CHECK_EQ(after.bytes_read - before.bytes_read, 12 * count);
        CHECK_EQ(after.bytes_written - before.bytes_written, 6 * count);
        OK(backend->synchronize(device, &error));
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        expect_clean();
        for (size_t k = 0; k < COUNT; k++) {
            uint16_t want = 0;
            mp_cast_select("scalar")->cast[MP_F32][MP_BF16](&f.master[k], &want, 1);
            CHECK_EQ(f.low[k], k < 3 * count ? want : 0);
        }
    }
    fixture_fini(&f);
}

/* Of a list that needs three launches the second fails: the first is under way and counted, the third is not tried. */
static void
test_failure_in_a_long_list_is_told(void)
{
    fixture f;
    mp_counters before, after;
    enum { LENGTH = 2 * MP_CUDA_ROWS + 1 };
    mp_row rows[LENGTH];
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    for (size_t j = 0; j < LENGTH; j++) {
        rows[j] = (mp_row){f.master + j, NULL, f.low + j, 1, MP_F32, MP_F32, MP_BF16};
    }
    backend->counters(device, &before);
    sim.fault("cuLaunchKernel", 2, 999, 1);
    CHECK_EQ(backend->launch(device, rows, LENGTH, 1.0, &error), MP_ERR_DEVICE);
    CHECK_EQ(sim.calls("cuLaunchKernel"), 2);
    backend->counters(device, &after);
    CHECK_EQ(after.launches - before.launches, 1);
    CHECK_EQ(after.bytes_written - before.bytes_written, 2 * MP_CUDA_ROWS);
    OK(backend->synchronize(device, &error));
    CHECK_EQ(f.low[2], 0x4000);
    CHECK_EQ(f.low[MP_CUDA_ROWS], 0xA5A5);
    CHECK_EQ(f.low[LENGTH - 1], 0xA5A5);
    fixture_fini(&f);
}

/* Launches on the private stream leave room beside them; those on a caller's stream take what the device has. */
static void
test_grids_follow_from_the_device(void)
{
    CHECK(device->private_grid > 0 && device->private_grid < device->grid);
    CHECK_EQ(device->grid % device->private_grid, 0);
    CHECK_EQ(device->grid / device->private_grid, 6 / MP_CUDA_PRIVATE_BLOCKS); /* six blocks of sm_90 fit there */
}

/* Rows that change in every step, with work pending: each launch has those that it was made with. */
static void
test_rows_change_while_work_is_pending(void)
{
    enum { LISTS = 5, STEPS = 12 };
    fixture f[LISTS];
    void *stream = new_stream();
    for (size_t s = 0; s < schedule_count; s++) {
        sim.begin(schedules[s], s);
        for (int i = 0; i < LISTS; i++) {
            fixture_init(&f[i]);
        }
        for (int step = 0; step < STEPS; step++) {
            for (int i = 0; i < LISTS; i++) {
                f[i].row.dst = f[i].low + step; /* so that element `step` is the first */
                f[i].row.numel = COUNT - STEPS;
                OK(backend->order_after(device, stream, &error));
                OK(launch(&f[i]));
                if (i % 2) {
                    /* On both streams, ordered by an event as the engine would. */
                    mp_event *event;
                    OK(backend->event_get(device, &event, &error));
                    OK(backend->event_record(event, &error));
                    OK(backend->event_wait(event, stream, &error));
                    backend->event_put(event);
                    OK(launch_on(&f[i], stream));
                }
                f[i].row = (mp_row){f[i].master, NULL, NULL, 1, MP_F32, MP_F32, MP_BF16};
            }
        }
        CHECK_EQ(sim.blocking(), 0);
        OK(backend->order_after(device, stream, &error));
        OK(backend->synchronize(device, &error));
        expect_clean();
        for (int i = 0; i < LISTS; i++) {
            for (int step = 0; step < STEPS; step++) {
                CHECK_EQ(f[i].low[step], 0); /* master 0 */
            }
            CHECK_EQ(f[i].low[STEPS], 0x3f80);
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
    OK(launch(f));
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
        const uint64_t created = sim.calls("cuEventCreate");
        const uint64_t launches = sim.calls("cuLaunchKernel"), records = sim.calls("cuEventRecord");
        const uint64_t waits = sim.calls("cuStreamWaitEvent");
        one_step(&f, stream, 3.0f);
        CHECK_EQ(sim.calls("cuLaunchKernel") - launches, 1);
        CHECK_EQ(sim.calls("cuEventRecord") - records, 2);
        CHECK_EQ(sim.calls("cuStreamWaitEvent") - waits, 2);
        CHECK_EQ(sim.calls("cuEventCreate"), created);
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
    OK(launch(&f));
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    CHECK(sim.report_count("RACE") > 0);
    sim.begin(SIM_LAZY, 3);
    fixture_fini(&f);
}

static void
test_context_of_the_caller_is_restored(void)
{
    fixture f;
    void *before, *after;
    sim.begin(SIM_EAGER, 1);
    fixture_init(&f);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    one_step(&f, NULL, 1.0f);
    sim.fault("cuLaunchKernel", 1, 999, 1);
    CHECK_EQ(launch(&f), MP_ERR_DEVICE);
    sim.fault("cuEventRecord", 1, 999, 1);
    CHECK_EQ(backend->order_after(device, NULL, &error), MP_ERR_DEVICE);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
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
    OK(launch(&f));
    OK(backend->event_record(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 0);
    OK(backend->event_synchronize(event, &error));
    OK(backend->event_query(event, &done, &error));
    CHECK_EQ(done, 1);
    CHECK_EQ(f.low[2], 0x4000);
    CHECK(backend->event_native(event) != NULL);
    OK(launch(&f));
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

static const char *const forbidden[] = {"cuEventQuery", "cuEventCreate", "cuEventSynchronize", "cuStreamSynchronize"};

static void
capture_step(fixture *f, void *stream, void **graph)
{
    mp_event *event;
    OK(backend->order_after(device, stream, &error));
    OK(launch(f));
    OK(backend->event_get(device, &event, &error));
    OK(backend->event_record(event, &error));
    OK(backend->event_wait(event, stream, &error));
    backend->event_put(event);
    OK(launch_on(f, stream));
    CHECK_EQ(sim.cuStreamEndCapture(stream, graph), 0);
}

static void
replay(const fixture *f, void *exec, void *stream, float value)
{
    write_masters(f, stream, value);
    CHECK_EQ(sim.cuGraphLaunch(exec, stream), 0);
    CHECK_EQ(read_low(f, stream), value);
}

/* A graph has the rows that it was captured with, whatever is launched outside it. */
static void
capture_and_replay(int schedule)
{
    fixture f, g;
    void *stream = new_stream(), *graph = NULL, *exec = NULL;
    uint64_t before[sizeof forbidden / sizeof *forbidden];
    sim.begin(schedule, 7);
    fixture_init(&f);
    fixture_init(&g);
    one_step(&f, stream, 1.0f);
    OK(backend->synchronize(device, &error));
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        before[i] = sim.calls(forbidden[i]);
    }
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 0), 0);
    capture_step(&g, stream, &graph);
    for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++) {
        CHECK_EQ(sim.calls(forbidden[i]), before[i]);
    }
    CHECK_EQ(sim.cuGraphInstantiate(&exec, graph, 0), 0);
    one_step(&g, stream, 2.0f); /* the same rows outside the graph, which has not run */
    replay(&g, exec, stream, 3.0f);
    for (int step = 0; step < 12; step++) {
        f.row.numel = COUNT - 1 - step;
        OK(backend->order_after(device, stream, &error));
        OK(launch_on(&f, stream));
        OK(backend->order_after(device, stream, &error));
        OK(launch(&f));
        OK(backend->synchronize(device, &error));
    }
    replay(&g, exec, stream, 4.0f);
    expect_clean();
    CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
    fixture_fini(&g);
    fixture_fini(&f);
}

/* Launches outside a capture while the private stream is part of one, which forbids this thread to ask and allocate. */
static void
test_capture_is_unharmed_by_other_streams(void)
{
    fixture f, other;
    void *stream = new_stream(), *free_stream = new_stream(), *graph = NULL;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    fixture_init(&other);
    CHECK_EQ(sim.cuStreamBeginCapture(stream, 1), 0);
    OK(backend->order_after(device, stream, &error));
    OK(launch_on(&other, free_stream));
    capture_step(&f, stream, &graph);
    CHECK_EQ(sim.cuStreamSynchronize(free_stream), 0);
    CHECK_EQ(other.low[2], 0x4000);
    CHECK_EQ(f.low[2], 0xA5A5); /* captured, not run */
    expect_clean();
    fixture_fini(&other);
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
        status |= backend->order_after(device, stream, &mine);
        status |= backend->launch(device, &f->row, 1, 1.0, &mine);
        status |= backend->event_get(device, &event, &mine);
        status |= backend->event_record(event, &mine);
        status |= backend->event_wait(event, stream, &mine);
        status |= backend->launch_on(device, &f->row, 1, 1.0, stream, &mine);
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
    mp_status status;
    f->row.numel = numel;
    if ((status = backend->order_after(device, stream, &error)) != MP_OK ||
        (status = launch(f)) != MP_OK ||
        (status = backend->event_get(device, &event, &error)) != MP_OK) {
        return status;
    }
    if ((status = backend->event_record(event, &error)) == MP_OK &&
        (status = backend->event_wait(event, stream, &error)) == MP_OK) {
        status = launch_on(f, stream);
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
    CHECK(nth > 15 && nth < 300);
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
    void *stream;
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
    return launch(a->f);
}

static mp_status
try_launch_on(attempt *a)
{
    return launch_on(a->f, a->stream);
}

static uint64_t
succeeded(const char *call, mp_status status)
{
    const int failed = status != MP_OK && strncmp(error.text, call, strlen(call)) == 0;
    return sim.calls(call) - (failed ? 1 : 0);
}

/* What did not happen is not counted. */
static void
expect_counted(const mp_counters *before, mp_status status)
{
    mp_counters after;
    backend->counters(device, &after);
    CHECK_EQ(after.launches - before->launches, succeeded("cuLaunchKernel", status));
    if (status != MP_OK) {
        CHECK_EQ(after.events, before->events);
        CHECK_EQ(after.waits, before->waits);
    }
}

/* Fails the nth call that an entry makes: it is told by name, the caller's context is current again,
 * nothing stays.  0 when the entry made fewer. */
static int
fail_entry(attempt *a, mp_status (*entry)(attempt *), uint64_t nth)
{
    mp_counters counted;
    void *before, *after;
    sim.begin(SIM_LAZY, nth);
    OK(launch(a->f));
    OK(backend->event_record(a->event, &error));
    const int events = sim.live("events");
    sim.begin(SIM_LAZY, nth); /* counts calls from here; what was launched is over */
    OK(backend->event_record(a->event, &error));
    backend->counters(device, &counted);
    CHECK_EQ(sim.cuCtxGetCurrent(&before), 0);
    const uint64_t calls = sim.calls("*");
    sim.fault("*", nth, 719, 1);
    const mp_status status = entry(a);
    expect_counted(&counted, status);
    if (status != MP_OK) {
        CHECK_EQ(status, MP_ERR_DEVICE);
        CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
        CHECK(strncmp(error.text, "cu", 2) == 0 && strstr(error.text, ", device 0") != NULL);
        CHECK_EQ(sim.live("events"), events);
    }
    else {
        expect_fault_to_come("*", nth, calls);
    }
    sim.begin(SIM_LAZY, nth);
    CHECK_EQ(sim.cuCtxGetCurrent(&after), 0);
    CHECK(before == after);
    one_step(a->f, a->stream, (float)nth);
    expect_clean();
    return status != MP_OK;
}

/* Each call of each entry fails once. */
static void
test_every_entry_survives_every_fault(void)
{
    mp_status (*const entries[])(attempt *) = {
        try_record, try_wait, try_query, try_event_synchronize, try_synchronize,
        try_order, try_launch, try_launch_on,
    };
    fixture f;
    attempt a = {&f, NULL, new_stream()};
    static mp_event *taken[POOL];
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const size_t count = drain_events(taken);
    a.event = taken[count - 1];
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        uint64_t nth = 1;
        while (fail_entry(&a, entries[i], nth) && nth < 60) {
            nth++;
        }
        CHECK(nth >= 4 && nth < 60); /* entering, the call, leaving; and a turn without a fault */
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

/* Each call under capture fails once: it is told, and the capture can be ended. */
static void
test_capture_survives_every_fault(void)
{
    mp_status status = MP_ERR_DEVICE;
    uint64_t nth = 1;
    for (; status != MP_OK && nth < 50; nth++) {
        fixture f;
        void *stream = new_stream(), *graph = NULL;
        sim.begin(SIM_LAZY, nth);
        fixture_init(&f);
        one_step(&f, stream, 1.0f);
        OK(backend->synchronize(device, &error));
        CHECK_EQ(sim.cuStreamBeginCapture(stream, 2), 0);
        const uint64_t calls = sim.calls("*");
        sim.fault("*", nth, 719, 1);
        status = launch_on(&f, stream);
        if (status != MP_OK) {
            CHECK_EQ(status, MP_ERR_DEVICE);
            CHECK(strstr(error.text, " failed: CUDA_ERROR_LAUNCH_FAILED (719): ") != NULL);
        }
        else {
            expect_fault_to_come("*", nth, calls);
            sim.begin(SIM_LAZY, nth); /* the fault is not for what follows */
        }
        CHECK_EQ(sim.cuStreamEndCapture(stream, &graph), 0);
        sim.begin(SIM_LAZY, nth);
        one_step(&f, stream, (float)nth);
        expect_clean();
        CHECK_EQ(sim.cuStreamSynchronize(stream), 0);
        fixture_fini(&f);
    }
    CHECK(nth >= 4 && nth < 50);
}

/* ---- Out of host memory ---- */

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
test_event_without_memory_is_told(void)
{
    static mp_event *taken[POOL];
    mp_event *event;
    fixture f;
    sim.begin(SIM_LAZY, 1);
    fixture_init(&f);
    const size_t count = drain_events(taken);
    malloc_fails_at(1);
    expect_out_of_memory(backend->event_get(device, &event, &error));
    CHECK(event == NULL);
    malloc_fails_at(1);
    OK(launch(&f)); /* needs none */
    OK(launch_on(&f, backend->native_stream(device)));
    malloc_fails_at(0);
    for (size_t i = 0; i < count; i++) {
        backend->event_put(taken[i]);
    }
    fixture_fini(&f);
    expect_clean();
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
        mp_event *mine;
        int done;
        const int refused = launch(&f) == MP_ERR_FORKED &&
                            backend->event_get(device, &mine, &error) == MP_ERR_FORKED && mine == NULL &&
                            backend->event_record(event, &error) == MP_ERR_FORKED &&
                            backend->event_synchronize(event, &error) == MP_ERR_FORKED &&
                            launch_on(&f, NULL) == MP_ERR_FORKED &&
                            backend->open(0, &other, &error) == MP_ERR_FORKED &&
                            backend->order_after(device, NULL, &error) == MP_ERR_FORKED &&
                            backend->event_query(event, &done, &error) == MP_ERR_FORKED &&
                            backend->event_wait(event, NULL, &error) == MP_ERR_FORKED &&
                            backend->synchronize(device, &error) == MP_ERR_FORKED &&
                            strstr(error.text, "fork") != NULL;
        backend->event_put(event);
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
    OK(launch(&f));
    CHECK_EQ(backend->synchronize(device, &error), MP_ERR_DEVICE);
    CHECK(strncmp(error.text, "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): ", 62) == 0);
    CHECK(strstr(error.text, ", device 0") != NULL);
    release(f.master);
    release(f.low);
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
    test_launch_converts_as_the_host(device, 60);
    test_launch_converts_as_the_host(second, 60);
    test_launch_without_elements_calls_nothing();
    test_launch_refuses_bad_rows();
    test_long_lists_take_several_launches();
    test_failure_in_a_long_list_is_told();
    test_grids_follow_from_the_device();
    test_rows_change_while_work_is_pending();
    test_step_is_ordered_and_cheap();
    test_missing_order_is_reported();
    test_context_of_the_caller_is_restored();
    test_event_states();
    for (size_t i = 0; i < schedule_count; i++) {
        capture_and_replay(schedules[i]);
    }
    test_capture_is_unharmed_by_other_streams();
    test_threads_share_a_device();
    test_step_survives_every_fault();
    test_every_entry_survives_every_fault();
    test_capture_survives_every_fault();
    test_event_that_was_not_made_is_not_kept();
    test_event_without_memory_is_told();
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
