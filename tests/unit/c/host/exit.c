/* The end of the process while work is pending. */
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"
#include "tests.h"

/* The program again, in the mode `how`; it must come to its end in good order. */
static void
check_exit(const char *how)
{
    fflush(stderr);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "test_host", how, (char *)NULL);
        _exit(99);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

int
exit_with_pending_work(int held)
{
    enum { LONG = 4000000 };
    static float values[LONG], one[LONG];
    static gate gate;
    mp_row row = add_row(values, one, LONG);
    if (held) {
        gate_close(&gate);
    }
    for (int i = 0; i < 50; i++) {
        OK(backend->launch(device, &row, 1, 1, &error));
    }
    if (held) {
        gate_wait_entered(&gate);
    }
    return check_failures != 0;
}

void
test_exit(void)
{
    check_exit("busy");
    check_exit("held");
}
