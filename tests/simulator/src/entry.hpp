// The prologue of every driver function: counting, injected faults, and the states in which a call is refused.
#pragma once

#include "objects.hpp"

namespace sim {

enum Needs : unsigned {
    kNothing = 0,
    kInit = 1,    // cuInit was called, in this process
    kContext = 2, // a live context is current
    kHealthy = 4, // and it has no sticky error; what tears down works without
    kUsual = kInit | kContext | kHealthy,
    kTeardown = kInit,
};

// Holds the lock for the length of a driver call.
struct Call {
    Call(const char *api, unsigned needs);
    Lock lock;
    CUresult status;
};

// A call that waits for the device, or might: counted, and checked for the GIL.
void note_blocking();

} // namespace sim

// First line of a driver function.  The name must be made text here and now: handed on, it would be expanded to the one
// with a version suffix.
#define SIM_CALL(api, needs) SIM_CALL_NAMED(#api, needs)

// The same for functions that a capture forbids (see capture_forbids_unsafe_call).
#define SIM_UNSAFE_CALL(api, needs)                                                                                    \
    SIM_CALL_NAMED(#api, needs);                                                                                       \
    if (const CUresult refused = sim::capture_forbids_unsafe_call())                                                   \
    return refused

#define SIM_CALL_NAMED(name, needs)                                                                                    \
    sim::Call call(name, needs);                                                                                       \
    if (call.status != CUDA_SUCCESS)                                                                                   \
    return call.status
