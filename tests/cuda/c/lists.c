/* Lists of rows: how many launches they take, and that each launch has the rows that it was made with. */
#include "cuda/device.h"
#include "cuda/launch.h"
#include "host/convert.h"
#include "rig.h"
#include "tests.h"

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
    CHECK_EQ(device->grid / device->private_grid, 4 / MP_CUDA_PRIVATE_BLOCKS); /* four blocks of 256 threads fit an SM, by the registers that the kernel may use */
}

/* Rows that change in every step, with work pending: each launch has those that it was made with. */
static void
test_rows_change_while_work_is_pending(void)
{
    enum { LISTS = 5, STEPS = 12 };
    fixture f[LISTS];
    void *stream = new_stream();
    for (size_t s = 0; s < SCHEDULES; s++) {
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

void
test_lists(void)
{
    test_long_lists_take_several_launches();
    test_failure_in_a_long_list_is_told();
    test_grids_follow_from_the_device();
    test_rows_change_while_work_is_pending();
}
