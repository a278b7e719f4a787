/* Descriptor tables of the CUDA backend: rows in device memory, and the launches that read them.  The functions are
 * entries of the backend; backend.h says what they do. */
#ifndef DDP_MP_CUDA_TABLE_H
#define DDP_MP_CUDA_TABLE_H

#include "cuda/device.h"

mp_status mp_cuda_table_new(mp_device *device, mp_table **out, mp_error *err);
mp_status mp_cuda_table_set(mp_table *table, const mp_row *rows, size_t count, mp_error *err);
void mp_cuda_table_free(mp_table *table);
mp_status mp_cuda_launch(mp_table *table, double divisor, mp_error *err);
mp_status mp_cuda_launch_on(mp_table *table, double divisor, void *caller_stream, mp_error *err);

#endif
