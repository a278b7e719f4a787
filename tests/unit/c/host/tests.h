/* The tests of the host backend, a function for each subject, in the order in which main.c runs them. */
#ifndef DDP_MP_TESTS_HOST_TESTS_H
#define DDP_MP_TESTS_HOST_TESTS_H

void test_backend(void); /* first: it knows the defaults */
void test_held(void);
void test_threads(void);
void test_fork(void);
void test_failure(void);
void test_exit(void);

/* What test_exit() runs in a process of its own: returns, as main's result, with work pending.  `held`: and with the
 * worker at a gate that nobody opens. */
int exit_with_pending_work(int held);

/* Prints figures; returns the exit status. */
int measure(void);

#endif
