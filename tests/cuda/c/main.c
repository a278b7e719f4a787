/* Tests of the CUDA backend, against the simulated driver of tests/simulator: opening and its failures, conversion bit
 * for bit, long lists of rows, order between streams, events, capture, faults, fork.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc \
 *     -Itests/kit/c -Itests/simulator tests/cuda/c/[a-z]*.c tests/kit/c/check.c csrc/core/backend.c csrc/core/row.c \
 *     csrc/cuda/backend.c csrc/cuda/device.c csrc/cuda/driver.c csrc/cuda/image.c csrc/cuda/launch.c csrc/cuda/nvrtc.c \
 *     csrc/host/convert.c csrc/host/convert_scalar.c csrc/host/convert_avx2.c csrc/host/convert_avx512.c \
 *     csrc/host/convert_neon.c -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc -ldl -lm -o test_cuda
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
#include <stdlib.h>

#include "rig.h"
#include "tests.h"

static void
test_all(void)
{
    sim.set_devices("90,75");
    test_initialisation();
    test_memory_of_opening();
    test_opening();
    test_conversion();
    test_lists();
    test_order();
    test_capture();
    test_threads();
    test_failure();
    test_memory();
    test_end();
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
        test_threads();
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
