/* Opening devices: without a driver, without an image, with every call failing once. */
#include "cuda/device.h"
#include "rig.h"
#include "tests.h"

void
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
    const size_t size = set_image_size(0);
    CHECK_EQ(backend->open(0, &device, &error), MP_ERR_UNAVAILABLE);
    CHECK(strncmp(error.text, "no kernel for device 0 (sm_90): no image in this test; ", 55) == 0);
    set_image_size(size);
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

void
test_initialisation(void)
{
    test_initialisation_survives_every_fault();
}

void
test_opening(void)
{
    test_open_without_image_says_so();
    test_open_tries_the_next_image();
    test_open_refuses_an_old_device();
    test_open_refuses_a_device_that_the_kernel_does_not_fit();
    test_open_survives_every_fault();
    test_open_finds_devices();
}
