/* The counts of check.h, of which a program has one of each. */
#include "check.h"

long check_count;
long check_failures;

int
check_failed(int ok)
{
    check_count++;
    if (ok) {
        return 0;
    }
    return ++check_failures <= CHECK_PRINTED;
}

void
check_true(int ok, const char *text, const char *file, int line)
{
    if (check_failed(ok)) {
        fprintf(stderr, "%s:%d: CHECK(%s) failed\n", file, line, text);
    }
}

void
check_equal(intmax_t a, intmax_t b, const char *text, const char *file, int line)
{
    if (check_failed(a == b)) {
        fprintf(stderr, "%s:%d: CHECK_EQ(%s) failed: %jd (0x%jx) != %jd (0x%jx)\n", file, line, text, a,
                (uintmax_t)a, b, (uintmax_t)b);
    }
}

void
check_equal_text(const char *a, const char *b, const char *text, const char *file, int line)
{
    if (check_failed(a == b || (a != NULL && b != NULL && strcmp(a, b) == 0))) {
        fprintf(stderr, "%s:%d: CHECK_STR_EQ(%s) failed: \"%s\" != \"%s\"\n", file, line, text,
                a != NULL ? a : "(null)", b != NULL ? b : "(null)");
    }
}

int
check_status(void)
{
    fprintf(stderr, "%ld checks, %ld failed\n", check_count, check_failures);
    return check_failures != 0 || check_count == 0;
}
