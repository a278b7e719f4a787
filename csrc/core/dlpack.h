/* Reads a tensor's DLPack description.  No Python, no memory touched but the description itself. */
#ifndef DDP_MP_DLPACK_READ_H
#define DDP_MP_DLPACK_READ_H

#include "core/dlpack_abi.h"
#include "core/view.h"

/* Reads a description; its shape and strides are copied.  Unless `whole`, shape, strides and layout of *out are left
 * untouched: that is the hot path.  NULL, or why the tensor is refused, a static text; *out then holds anything. */
const char *mp_dlpack_read(const dl_tensor *tensor, int whole, mp_view *out);

#endif
