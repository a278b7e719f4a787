/* Threads that share a device. */
#include <pthread.h>

#include "rig.h"
#include "tests.h"

enum { THREADS = 4 };

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

void
test_threads(void)
{
    test_threads_share_a_device();
}
