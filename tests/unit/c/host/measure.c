/* The figures that the defaults in host/backend.c rest on. */
#include <stdlib.h>
#include <time.h>

#include "rig.h"
#include "tests.h"

static double
microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int
ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median time of a launch and, with `wait`, of waiting for it, `pause` ms after the one before. */
static double
measure_launch(const mp_row *row, int wait, long pause)
{
    enum { TIMES = 101 };
    double times[TIMES];
    mp_event *event = event_new();
    for (size_t i = 0; i < TIMES; i++) {
        nap(pause);
        double begin = microseconds();
        OK(backend->launch(device, row, 1, 1, &error));
        OK(backend->event_record(event, &error));
        if (wait) {
            OK(backend->event_wait(event, NULL, &error));
        }
        times[i] = microseconds() - begin;
        OK(backend->synchronize(device, &error));
    }
    backend->event_put(event);
    qsort(times, TIMES, sizeof(times[0]), ascending);
    return times[TIMES / 2];
}

int
measure(void)
{
    enum { MOST = 128 << 20 };
    float *src = floats(MOST / 4, 1);
    uint16_t *dst = malloc(MOST / 2);
    memset(dst, 0, MOST / 2);
    printf("float32 -> bfloat16, %s, median us\n", mp_host_isa());
    printf("%10s %10s %14s %14s %14s\n", "KiB moved", "at once", "launch, asleep", "launch + wait", "non-temporal");
    for (size_t bytes = 3 << 10; bytes / 3 * 2 <= MOST; bytes *= 2) {
        mp_row row = cast_row(src, dst, (int64_t)(bytes / 6));
        mp_host_set_stream_bytes(SIZE_MAX);
        mp_host_set_inline_bytes(SIZE_MAX);
        double at_once = measure_launch(&row, 0, 0);
        mp_host_set_inline_bytes(0);
        double launch = measure_launch(&row, 0, 1);
        double waited = measure_launch(&row, 1, 0);
        mp_host_set_stream_bytes(0);
        double streamed = measure_launch(&row, 1, 0);
        printf("%10zu %10.1f %14.1f %14.1f %14.1f\n", bytes >> 10, at_once, launch, waited, streamed);
    }
    free(dst);
    free(src);
    return check_status();
}
