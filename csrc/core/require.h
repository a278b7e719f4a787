/* Invariants that debug builds check: a broken one is told with its place, and the process ends.  Release builds have none
 * of this. */
#ifndef DDP_MP_REQUIRE_H
#define DDP_MP_REQUIRE_H

#ifndef NDEBUG

#include <stdio.h>
#include <stdlib.h>

static _Noreturn void
mp_broken(const char *file, int line, const char *invariant)
{
    fprintf(stderr, "ddp_mp: %s does not hold (%s:%d)\n", invariant, file, line);
    abort();
}

#define MP_REQUIRE(condition) ((condition) ? (void)0 : mp_broken(__FILE__, __LINE__, #condition))

#endif

#endif
