#include "fatbin.hpp"

#include <cstdint>
#include <cstring>

#include "ptx.hpp"

namespace ptx {
namespace {

constexpr uint32_t kFatbinMagic = 0xba55ed50u;
constexpr uint32_t kElfMagic = 0x464c457fu;
constexpr uint32_t kWrapperMagic = 0x466243b1u; // __fatBinC_Wrapper_t, what __cudaRegisterFatBinary takes

enum : uint16_t { kPtx = 1, kCubin = 2 };
constexpr uint32_t kLz4 = 0x2000, kZstd = 0x8000;

template <class T>
T load(const uint8_t *at)
{
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// The container has no public description; these offsets were read off nvcc 13.0's output and are checked as far as
// possible, so that a change of format is an error and not a wrong kernel.
struct Header {
    explicit Header(const uint8_t *at)
        : version(load<uint16_t>(at + 4)), size(load<uint16_t>(at + 6)), payload(load<uint64_t>(at + 8))
    {
    }
    uint16_t version, size;
    uint64_t payload;
};

struct Entry {
    explicit Entry(const uint8_t *at)
        : kind(load<uint16_t>(at)), header(load<uint32_t>(at + 4)), payload(load<uint64_t>(at + 8)),
          arch(load<uint32_t>(at + 28)), flags(load<uint32_t>(at + 40))
    {
    }
    uint16_t kind;
    uint32_t header;
    uint64_t payload;
    uint32_t arch, flags;
};

constexpr uint64_t kEntryBytes = 64;

Image read_entry(const Entry &entry, const uint8_t *payload)
{
    Image image;
    image.arch = static_cast<int>(entry.arch);
    image.binary = entry.kind == kCubin;
    if (image.binary)
        return image;
    if (entry.flags & (kLz4 | kZstd))
        throw LoadError("compressed PTX in the fat binary: build it with --compress-mode=none");
    image.text.assign(reinterpret_cast<const char *>(payload), entry.payload);
    image.text.resize(std::strlen(image.text.c_str())); // padded with NUL
    return image;
}

std::vector<Image> read_container(const uint8_t *data)
{
    const Header header(data);
    if (header.version != 1 || header.size < 16)
        throw LoadError("fat binary of an unknown version " + std::to_string(header.version));
    std::vector<Image> images;
    const uint8_t *at = data + header.size, *end = at + header.payload;
    while (at < end) {
        if (static_cast<uint64_t>(end - at) < kEntryBytes)
            throw LoadError("truncated entry in the fat binary");
        const Entry entry(at);
        if (entry.kind != kPtx && entry.kind != kCubin)
            throw LoadError("entry of unknown kind " + std::to_string(entry.kind) + " in the fat binary");
        if (entry.header < kEntryBytes || entry.header + entry.payload > static_cast<uint64_t>(end - at))
            throw LoadError("entry with an impossible size in the fat binary");
        images.push_back(read_entry(entry, at + entry.header));
        at += entry.header + entry.payload;
    }
    return images;
}

} // namespace

std::vector<Image> read_images(const void *data)
{
    const auto *bytes = static_cast<const uint8_t *>(data);
    const auto magic = load<uint32_t>(bytes);
    if (magic == kFatbinMagic)
        return read_container(bytes);
    if (magic == kElfMagic)
        throw LoadError("a cubin cannot be interpreted: load a fat binary with PTX inside");
    if (magic == kWrapperMagic)
        throw LoadError("a fat binary wrapper: pass the fat binary that it points at");
    Image image;
    image.text = reinterpret_cast<const char *>(bytes);
    return {image};
}

} // namespace ptx
