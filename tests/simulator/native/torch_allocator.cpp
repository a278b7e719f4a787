// PyTorch's CPU allocator, which takes device memory from the simulator where it is told to.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

void *(*take_device)(size_t) = nullptr;
int (*give_device)(void *) = nullptr;
thread_local bool on_device = false;

c10::Allocator &host()
{
    static c10::Allocator &one = *c10::GetCPUAllocator(); // what was PyTorch's before
    return one;
}

void give(void *memory)
{
    if (memory && !give_device(memory))
        host().raw_deleter()(memory);
}

class Allocator final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t bytes) override
    {
        void *memory = on_device && bytes ? take_device(bytes) : nullptr;
        if (memory == nullptr)
            return host().allocate(bytes);
        return {memory, memory, &give, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give; }
    void copy_data(void *to, const void *from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

} // namespace

extern "C" {

// Once a process; tensors refer to the allocator for ever.
void torch_allocator_install(void *(*take)(size_t), int (*give_back)(void *))
{
    take_device = take;
    give_device = give_back;
    host();
    c10::SetCPUAllocator(new Allocator, 255);
}

// Whether the calling thread allocates on the device; returns what was before.
int torch_allocator_on_device(int on)
{
    const bool before = on_device;
    on_device = on != 0;
    return before;
}
}
