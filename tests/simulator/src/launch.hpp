// Kernel launches: the bridge between the interpreter and the simulated device.
#pragma once

#include "objects.hpp"
#include "ptx_exec.hpp"

namespace sim {

struct LaunchShape {
    ptx::Dim3 grid, block;
    unsigned shared = 0;
};

// Checks and enqueues a launch.  Parameters are copied here, as the driver does.
CUresult launch(Function &function, const LaunchShape &shape, Stream &stream, void **parameters, void **extra,
                Lock &lock);

} // namespace sim
