#include "module.hpp"

#include <algorithm>
#include <cstdlib>

#include "fatbin.hpp"
#include "state.hpp"

namespace sim {
namespace {

// The newest PTX version that a driver of a CUDA version can compile, as 10 * major + minor.  From 13.0 on both
// advance together; before, PTX 8.0 came with CUDA 12.0 and 7.0 with 11.0, with one minor version missing each.
int newest_ptx(int driver_version)
{
    const int major = driver_version / 1000, minor = driver_version % 1000 / 10;
    if (major >= 13)
        return 10 * (major - 4) + minor;
    if (major == 12) // 8.5 served 12.5 and 12.6
        return 80 + (minor <= 5 ? minor : minor - 1);
    if (major == 11)
        return 70 + minor;
    return 65;
}

int ptx_version(const std::string &text)
{
    const size_t at = text.find(".version");
    if (at == std::string::npos)
        return 0;
    char *end = nullptr;
    const long major = std::strtol(text.c_str() + at + 8, &end, 10);
    return static_cast<int>(10 * major + (*end == '.' ? std::strtol(end + 1, nullptr, 10) : 0));
}

int ptx_target(const std::string &text)
{
    const size_t at = text.find(".target sm_");
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + 11);
}

bool same_family(int arch, int capability) { return arch / 10 == capability / 10 && arch <= capability; }

const ptx::Image *best(const std::vector<ptx::Image> &images, bool binary, int capability)
{
    const ptx::Image *found = nullptr;
    for (const ptx::Image &image : images) {
        const bool fits = binary ? same_family(image.arch, capability) : image.arch <= capability;
        if (image.binary == binary && fits && (found == nullptr || image.arch > found->arch))
            found = &image;
    }
    return found;
}

// A driver prefers machine code made for the device and compiles PTX otherwise.  We interpret the PTX that the machine
// code was made from, which is then not subject to the driver's PTX version.
CUresult choose(std::vector<ptx::Image> &images, int capability, const ptx::Image *&out)
{
    for (ptx::Image &image : images)
        if (!image.binary && image.arch == 0)
            image.arch = ptx_target(image.text);
    if (const ptx::Image *binary = best(images, true, capability)) {
        for (const ptx::Image &image : images)
            if (!image.binary && image.arch == binary->arch)
                out = &image;
        if (out == nullptr)
            throw ptx::LoadError("machine code for sm_" + std::to_string(binary->arch) +
                                 " without its PTX: embed both, code=[sm_N,compute_N]");
        return CUDA_SUCCESS;
    }
    out = best(images, false, capability);
    if (out == nullptr)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    const bool too_new = ptx_version(out->text) > newest_ptx(state().machine.driver_version);
    return too_new ? CUDA_ERROR_UNSUPPORTED_PTX_VERSION : CUDA_SUCCESS;
}

std::unique_ptr<Module> make_module(Context *context, const ptx::Image &image)
{
    auto module = std::make_unique<Module>();
    module->context = context;
    module->code = ptx::parse(image.text);
    for (auto &[name, entry] : module->code->entries) {
        auto function = std::make_unique<Function>();
        function->module = module.get();
        function->entry = &entry;
        module->functions[name] = std::move(function);
    }
    auto &storage = module->code->storage;
    if (!storage.empty())
        state().memory.add(reinterpret_cast<uint64_t>(storage.data()), storage.size(), Range::Module,
                           context->device->ordinal, "module variables");
    return module;
}

} // namespace

CUresult load_module(Context *context, const void *data, std::unique_ptr<Module> &out)
{
    try {
        auto images = ptx::read_images(data);
        const ptx::Image *image = nullptr;
        if (const CUresult refused = choose(images, context->device->capability, image))
            return refused;
        out = make_module(context, *image);
        return CUDA_SUCCESS;
    } catch (const ptx::LoadError &error) {
        report("LOAD", error.what());
        return CUDA_ERROR_INVALID_PTX;
    }
}

} // namespace sim
