/* Tests of the host backend: order, events, rows that change, held workers, threads, fork, failure, exit.
 *
 * gcc -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -pthread -fsanitize=address,undefined -Icsrc \
 *     -Itests/kit/c tests/unit/c/host/[a-z]*.c tests/kit/c/check.c csrc/core/backend.c csrc/core/row.c csrc/host/backend.c \
 *     csrc/host/run.c csrc/host/stream.c csrc/host/convert.c csrc/host/convert_scalar.c csrc/host/convert_avx2.c \
 *     csrc/host/convert_avx512.c csrc/host/convert_neon.c \
 *     -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=pthread_create -o test_host
 *
 * Also with -fsanitize=thread.  Built with -O2 and without a sanitizer, `test_host measure` prints the figures that the
 * defaults in host/backend.c rest on.
 */
#include <unistd.h>

#include "rig.h"
#include "tests.h"

int
main(int argc, char **argv)
{
    alarm(240); /* a hang is a failure too */
    OK(backend->open(0, &device, &error));
    if (argc > 1) {
        return strcmp(argv[1], "measure") == 0 ? measure() : exit_with_pending_work(strcmp(argv[1], "held") == 0);
    }
    test_backend();
    test_held();
    test_threads();
    test_fork();
    test_failure();
    test_exit();
    return check_status();
}
