/* Makes the nth allocation from now fail.  Link with
 * -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc
 * so that the calls of the files under test come here. */
#ifndef DDP_MP_TESTS_MALLOC_FAULT_H
#define DDP_MP_TESTS_MALLOC_FAULT_H

#include <stdatomic.h>
#include <stddef.h>

static atomic_long malloc_fault_in; /* allocations until the one that fails; at or below 0: none */

static inline void
malloc_fails_at(long nth)
{
    atomic_store(&malloc_fault_in, nth);
}

static inline int
malloc_fails_now(void)
{
    return atomic_load(&malloc_fault_in) > 0 && atomic_fetch_sub(&malloc_fault_in, 1) == 1;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);

void *
__wrap_malloc(size_t size)
{
    return malloc_fails_now() ? NULL : __real_malloc(size);
}

void *
__wrap_calloc(size_t count, size_t size)
{
    return malloc_fails_now() ? NULL : __real_calloc(count, size);
}

void *
__wrap_realloc(void *old, size_t size)
{
    return malloc_fails_now() ? NULL : __real_realloc(old, size);
}

#endif
