/* Checks for the plain C tests.  A failed check prints where and what, is counted, and the test goes on: one run
 * shows every failure.  End main with `return check_status();`, and build with check.c, which counts for all files of
 * a program.
 */
#ifndef DDP_MP_TESTS_CHECK_H
#define DDP_MP_TESTS_CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A wrong loop fails once an element; nobody reads more than this many lines. */
#define CHECK_PRINTED 40

extern long check_count;
extern long check_failures;

/* Counts a check; non-zero when the caller should print its failure. */
int check_failed(int ok);

void check_true(int ok, const char *text, const char *file, int line);
void check_equal(intmax_t a, intmax_t b, const char *text, const char *file, int line);
void check_equal_text(const char *a, const char *b, const char *text, const char *file, int line);

#define CHECK(cond) check_true((cond) ? 1 : 0, #cond, __FILE__, __LINE__)
/* Integers or pointers of any type; each side is evaluated once. */
#define CHECK_EQ(a, b) check_equal((intmax_t)(a), (intmax_t)(b), #a ", " #b, __FILE__, __LINE__)
#define CHECK_STR_EQ(a, b) check_equal_text((a), (b), #a ", " #b, __FILE__, __LINE__)

/* The exit status of the program; says how much was checked, so that an empty test does not look like a pass. */
int check_status(void);

#endif
