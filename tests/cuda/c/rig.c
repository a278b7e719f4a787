/* The simulator and the fixtures that rig.h declares. */
#include "rig.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "cuda/embedded.h"

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

driver sim;
mp_device *device;
mp_error error;
const int schedules[SCHEDULES] = {SIM_EAGER, SIM_LAZY, SIM_RANDOM, SIM_RANDOM, SIM_THREAD};

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

void
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

void
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

size_t
set_image_size(size_t size)
{
    const size_t previous = image_size;
    image_size = size;
    return previous;
}

void
expect_clean(void)
{
    CHECK_STR_EQ(sim.report(), "");
}

void
expect_fault_to_come(const char *function, uint64_t nth, uint64_t calls_before)
{
    CHECK(sim.calls(function) - calls_before < nth);
}

/* ---- Memory of a framework ---- */

void *
device_memory(size_t bytes, const char *label)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(memory, 0xA5, (bytes + 63) / 64 * 64);
    sim.own(memory, (bytes + 63) / 64 * 64, label, 0);
    return memory;
}

void
release(void *memory)
{
    sim.disown(memory);
    free(memory);
}

void *
new_stream(void)
{
    void *context, *stream = NULL;
    CHECK_EQ(sim.cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(sim.cuCtxPushCurrent(context), 0);
    CHECK_EQ(sim.cuStreamCreate(&stream, 1), 0);
    return stream;
}

void
fixture_init(fixture *f)
{
    f->master = device_memory(COUNT * sizeof *f->master, "master");
    f->low = device_memory(COUNT * sizeof *f->low, "low");
    for (int i = 0; i < COUNT; i++) {
        f->master[i] = (float)i;
    }
    f->row = (mp_row){f->master, NULL, f->low, COUNT, MP_F32, MP_F32, MP_BF16};
}

void
fixture_fini(fixture *f)
{
    OK(backend->synchronize(device, &error));
    release(f->master);
    release(f->low);
}

mp_status
launch(const fixture *f)
{
    return backend->launch(device, &f->row, 1, 1.0, &error);
}

mp_status
launch_on(const fixture *f, void *stream)
{
    return backend->launch_on(device, &f->row, 1, 1.0, stream, &error);
}

void
write_masters(const fixture *f, void *stream, float value)
{
    static float values[COUNT];
    for (int i = 0; i < COUNT; i++) {
        values[i] = value;
    }
    const sim_range range = {f->master, sizeof values, 1};
    sim.work(stream, &range, 1, f->master, values, sizeof values, "optimizer");
}

float
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

void
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

/* ---- Events ---- */

size_t
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
