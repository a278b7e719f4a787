/* What comes last: a fork, and a fault of the device, after which it is of no use. */
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"
#include "tests.h"

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

/* A fault of the device is there to stay, so that nothing can be tested after it. */
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

void
test_end(void)
{
    test_fork_is_refused();
    test_device_fault_is_told();
}
