/* Checks for the plain C tests.  A failed check prints where and what, is counted, and the test goes on: one run
 * shows every failure.  End main with `return check_status();`.
 */
#ifndef DDP_MP_TESTS_CHECK_H
#define DDP_MP_TESTS_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A wrong loop fails once an element; nobody reads more than this many lines. */
#define CHECK_PRINTED 40

static long check_failures;
static long check_count;

/* Counts a check; non-zero when the caller should print its failure. */
static inline int
check_failed(int ok)
{
    check_count++;
    if (ok) {
        return 0;
    }
    return ++check_failures <= CHECK_PRINTED;
}

static inline void
check_true(int ok, const char *text, const char *file, int line)
{
    if (check_failed(ok)) {
        fprintf(stderr, "%s:%d: CHECK(%s) failed\n", file, line, text);
    }
}

static inline void
check_equal(intmax_t a, intmax_t b, const char *text, const char *file, int line)
{
    if (check_failed(a == b)) {
        fprintf(stderr, "%s:%d: CHECK_EQ(%s) failed: %jd (0x%jx) != %jd (0x%jx)\n", file, line, text, a,
                (uintmax_t)a, b, (uintmax_t)b);
    }
}

static inline void
check_equal_text(const char *a, const char *b, const char *text, const char *file, int line)
{
    if (check_failed(a == b || (a != NULL && b != NULL && strcmp(a, b) == 0))) {
        fprintf(stderr, "%s:%d: CHECK_STR_EQ(%s) failed: \"%s\" != \"%s\"\n", file, line, text,
                a != NULL ? a : "(null)", b != NULL ? b : "(null)");
    }
}

#define CHECK(cond) check_true((cond) ? 1 : 0, #cond, __FILE__, __LINE__)
/* Integers or pointers of any type; each side is evaluated once. */
#define CHECK_EQ(a, b) check_equal((intmax_t)(a), (intmax_t)(b), #a ", " #b, __FILE__, __LINE__)
#define CHECK_STR_EQ(a, b) check_equal_text((a), (b), #a ", " #b, __FILE__, __LINE__)

/* The exit status of the program; says how much was checked, so that an empty test does not look like a pass. */
static inline int
check_status(void)
{
    fprintf(stderr, "%ld checks, %ld failed\n", check_count, check_failures);
    return check_failures != 0 || check_count == 0;
}

#endif
