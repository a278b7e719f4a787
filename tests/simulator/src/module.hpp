// Choosing and loading the image that a driver would take.
#pragma once

#include <memory>

#include "objects.hpp"

namespace sim {

// Loads a fat binary or PTX text for a device.  On failure the reason is reported as LOAD, except where the image is
// simply not for this device or driver.
CUresult load_module(Context *context, const void *data, std::unique_ptr<Module> &out);

} // namespace sim
