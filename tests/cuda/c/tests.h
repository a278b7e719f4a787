/* The tests of the CUDA backend, a function for each subject.  main.c runs them in this order: each needs what those
 * before it left, such as an open device.
 */
#ifndef DDP_MP_TESTS_CUDA_TESTS_H
#define DDP_MP_TESTS_CUDA_TESTS_H

#include "core/backend.h"

/* Without a simulator: a machine that has no driver is told so. */
void test_open_without_driver_says_so(void);

/* First of all, since the driver is initialised once in a process. */
void test_initialisation(void);

/* Before a device was opened for the first time. */
void test_memory_of_opening(void);

/* Leaves device 0 and device 1 open. */
void test_opening(void);

void test_conversion(void);
void test_lists(void);
void test_order(void);
void test_capture(void);
void test_threads(void);
void test_failure(void);
void test_memory(void);

/* Leaves device 0 unusable. */
void test_end(void);

/* A part of test_conversion(), which `test_cuda convert` runs on the device that the environment asks for. */
void test_launch_converts_as_the_host(mp_device *on, int rounds);

#endif
