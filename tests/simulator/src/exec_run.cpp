#include <algorithm>
#include <numeric>
#include <random>

#include "exec_values.hpp"

namespace ptx {
namespace {

constexpr uint64_t kMaxBackEdges = 20'000'000; // of one thread: a loop that long is taken for an endless one

void branch(Frame &f, const Insn &i)
{
    const uint32_t target = i.targets[0];
    if (target < f.pc && ++f.back_edges > kMaxBackEdges)
        throw Fault(kLaunchTimeout,
                    "endless loop in " + f.launch->entry.name + " at PTX line " + std::to_string(i.line));
    f.pc = target;
}

void branch_index(Frame &f, const Insn &i)
{
    const uint32_t which = get<uint32_t>(f, i, 0);
    if (which >= i.targets.size())
        throw Fault(kLaunchFailed, "brx.idx outside its table in " + f.launch->entry.name);
    f.pc = i.targets[which];
}

void barrier(Frame &f, const Insn &) { f.state = Frame::AtBarrier; }
void leave(Frame &f, const Insn &) { f.state = Frame::Done; }
void nothing(Frame &, const Insn &) {}
void trap(Frame &f, const Insn &) { throw Fault(kLaunchFailed, "trap in " + f.launch->entry.name); }

// Threads of one block, run in turns.
class Block {
public:
    Block(const Launch &launch, std::vector<uint64_t> &counts)
        : launch_(launch), counts_(counts), threads_(static_cast<uint32_t>(launch.block.count())), order_(threads_),
          dynamic_at_((launch.entry.shared_bytes + 15) / 16 * 16),
          shared_bytes_(launch.entry.dynamic_shared ? dynamic_at_ + launch.dynamic_shared : launch.entry.shared_bytes),
          resident_(launch.entry.has_barrier ? threads_ : 1), registers_(resident_ * launch.entry.registers()),
          local_(resident_ * launch.entry.local_bytes), frames_(resident_)
    {
        std::iota(order_.begin(), order_.end(), 0u);
        initial_ = image();
    }

    void shuffle(std::mt19937_64 &random) { std::shuffle(order_.begin(), order_.end(), random); }

    void run(uint32_t block)
    {
        block_ = block;
        SharedMemory shared(shared_bytes_, launch_.entry.granule);
        shared_ = &shared;
        if (resident_ == 1)
            run_independent();
        else
            run_with_barriers();
    }

private:
    // Registers as they are before the first instruction; whatever is not set has a recognisable value.
    std::vector<uint64_t> image() const
    {
        const Entry &e = launch_.entry;
        std::vector<uint64_t> r(e.registers(), 0xbadbadbadbadbadull);
        for (size_t k = 0; k < e.constants.size(); k++) {
            const Constant &c = e.constants[k];
            r[kFirstDeclared + e.declared + k] =
                c.kind == Constant::ParamAddress    ? reinterpret_cast<uint64_t>(launch_.params) + c.value
                : c.kind == Constant::ModuleAddress ? reinterpret_cast<uint64_t>(launch_.storage) + c.value
                : c.kind == Constant::DynamicShared ? dynamic_at_
                                                    : c.value;
        }
        const auto set = [&r](Special s, uint64_t v) { r[special_register(s)] = v; };
        set(Special::NtidX, launch_.block.x), set(Special::NtidY, launch_.block.y),
            set(Special::NtidZ, launch_.block.z);
        set(Special::NctaidX, launch_.grid.x), set(Special::NctaidY, launch_.grid.y),
            set(Special::NctaidZ, launch_.grid.z);
        return r;
    }

    void start(Frame &f, uint32_t slot, uint32_t thread)
    {
        const Entry &e = launch_.entry;
        f = Frame();
        f.r = &registers_[slot * e.registers()];
        f.launch = &launch_;
        f.shared = shared_;
        f.local = local_.data() + slot * e.local_bytes;
        std::copy(initial_.begin(), initial_.end(), f.r);
        std::fill_n(f.local, e.local_bytes, uint8_t{0xcd});
        const Dim3 &b = launch_.block, &g = launch_.grid;
        const auto set = [&f](Special s, uint64_t v) { f.r[special_register(s)] = v; };
        set(Special::TidX, thread % b.x), set(Special::TidY, thread / b.x % b.y),
            set(Special::TidZ, thread / b.x / b.y);
        set(Special::CtaidX, block_ % g.x), set(Special::CtaidY, block_ / g.x % g.y),
            set(Special::CtaidZ, block_ / g.x / g.y);
        set(Special::LaneId, thread % 32), set(Special::WarpId, thread / 32);
        f.segment = launch_.memory.order.begin(block_, thread, 0);
    }

    void run_independent()
    {
        for (uint32_t thread : order_) {
            start(frames_[0], 0, thread);
            step(frames_[0]);
        }
    }

    void run_with_barriers()
    {
        for (uint32_t thread = 0; thread < threads_; thread++)
            start(frames_[thread], thread, thread);
        bool any = true;
        for (uint32_t epoch = 1; any; epoch++) {
            any = false;
            for (uint32_t thread : order_) {
                Frame &f = frames_[thread];
                if (f.state == Frame::Done)
                    continue;
                f.state = Frame::Running;
                step(f);
                any |= f.state == Frame::AtBarrier;
                f.segment = launch_.memory.order.begin(block_, thread, epoch);
            }
        }
    }

    void step(Frame &f)
    {
        const Insn *code = launch_.entry.code.data();
        while (f.state == Frame::Running) {
            const Insn &i = code[f.pc];
            f.pc++;
            if (i.guard && (f.r[i.guard] != 0) == i.guard_not)
                continue;
            counts_[static_cast<size_t>(&i - code)]++;
            i.run(f, i);
        }
    }

    const Launch &launch_;
    std::vector<uint64_t> &counts_;
    uint32_t threads_;
    std::vector<uint32_t> order_;
    size_t dynamic_at_, shared_bytes_;
    uint32_t resident_; // threads that live at the same time: all of a block when there are barriers
    std::vector<uint64_t> registers_, initial_;
    std::vector<uint8_t> local_;
    std::vector<Frame> frames_;
    SharedMemory *shared_ = nullptr;
    uint32_t block_ = 0;
};

} // namespace

Handler find_control(const Insn &i)
{
    switch (i.op) {
    case Op::Bra: return branch;
    case Op::BrxIdx: return branch_index;
    case Op::Barrier: return barrier;
    case Op::Ret: return leave;
    case Op::Trap: return trap;
    case Op::Nop: return nothing;
    default: return nullptr;
    }
}

Handler find_handler(const Insn &i)
{
    const bool float_flags_fit = i.type == Type::F32 || i.source == Type::F32;
    if ((i.ftz || i.sat) && !float_flags_fit)
        return nullptr;
    for (auto find : {find_control, find_memory, find_convert, find_arithmetic, find_bits})
        if (const Handler h = find(i))
            return h;
    return nullptr;
}

void run(const Launch &launch, std::vector<uint64_t> &counts)
{
    counts.assign(launch.entry.code.size(), 0);
    std::mt19937_64 random(launch.seed);
    std::vector<uint32_t> blocks(launch.grid.count());
    std::iota(blocks.begin(), blocks.end(), 0u);
    Block block(launch, counts);
    if (launch.seed) { // the order of blocks and threads is undefined on a device: a kernel must not depend on it
        std::shuffle(blocks.begin(), blocks.end(), random);
        block.shuffle(random);
    }
    for (uint32_t b : blocks)
        block.run(b);
}

} // namespace ptx
