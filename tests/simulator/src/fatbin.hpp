// Reader of the fat binary container that nvcc writes.  Only what a PTX interpreter needs: uncompressed PTX text.
#pragma once

#include <string>
#include <vector>

namespace ptx {

struct Image {
    int arch = 0;        // 90 for sm_90; 0 for plain PTX text, which says it itself
    bool binary = false; // a cubin: cannot be interpreted, but decides which image a driver would take
    std::string text;    // PTX; empty for a cubin
};

// The images inside `data`: a fat binary, or NUL-terminated PTX text.  Throws LoadError for anything else and for
// compressed PTX, saying how to build instead.
std::vector<Image> read_images(const void *data);

} // namespace ptx
