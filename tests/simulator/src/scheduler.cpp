#include "scheduler.hpp"

#include <chrono>
#include <thread>

#include "capture.hpp"
#include "state.hpp"

namespace sim {
namespace {

bool is_delayed(const Op &op)
{
    const State &s = state();
    return !s.delayed.empty() && op.work.label.find(s.delayed) != std::string::npos;
}

// The first operation of the stream, if nothing holds it back.
Op *runnable(const Stream &stream)
{
    if (stream.queue.empty() || stream.queue.front()->running)
        return nullptr;
    Op &op = *stream.queue.front();
    for (const OpPtr &before : op.waits)
        if (!before->done)
            return nullptr;
    return &op;
}

// Streams that can advance, by id so that a seed replays.
std::vector<Stream *> ready_streams(bool delayed)
{
    std::vector<Stream *> ready;
    for (const auto &[id, stream] : state().busy)
        if (const Op *op = runnable(*stream); op && is_delayed(*op) == delayed)
            ready.push_back(stream);
    return ready;
}

void run_front(Stream &stream, Lock &lock)
{
    State &s = state();
    const OpPtr op = stream.queue.front();
    op->running = true;
    if (s.schedule == SIM_THREAD && is_delayed(*op)) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(s.delay_us));
        lock.lock();
    }
    if (op->work.run && stream.context->sticky == CUDA_SUCCESS) // a dead context runs nothing more
        op->work.run(*op, lock);
    op->done = true;
    op->running = false;
    op->work.run = nullptr; // drops what the closure keeps alive
    op->waits.clear();
    op->staged.clear();
    stream.queue.pop_front();
    if (stream.queue.empty())
        s.busy.erase(stream.id);
    s.changed.notify_all();
}

void background(uint64_t seed)
{
    State &s = state();
    std::mt19937_64 random(seed);
    Lock lock(s.mutex);
    for (;;) {
        if (s.schedule != SIM_THREAD || step(1, lock) == 0)
            s.changed.wait(lock);
        lock.unlock(); // so that hosts get between operations
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
        lock.lock();
    }
}

bool background_started = false;

// Work of the legacy stream and of blocking streams waits for each other.
void order_with_default_stream(Stream &stream)
{
    if (stream.legacy) {
        for (const auto &[handle, other] : state().streams)
            if (other->context == stream.context && other->blocking())
                wait_for(stream, other->tail);
    } else if (stream.blocking()) {
        wait_for(stream, stream.context->legacy->tail);
    }
}

} // namespace

Stream *make_stream(Context *context, unsigned flags, int priority, const std::string &name)
{
    State &s = state();
    auto stream = std::make_unique<Stream>();
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = s.next_stream++;
    stream->name = name.empty() ? "stream " + std::to_string(stream->id) : name;
    return adopt(s.streams, std::move(stream));
}

Stream *find_stream(CUstream handle)
{
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
        const Context *context = current_context();
        return context ? context->legacy : nullptr;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        report("MISUSE", "the per-thread default stream is not simulated");
        return nullptr;
    }
    Stream *stream = lookup(state().streams, handle);
    return stream && !stream->internal ? stream : nullptr;
}

void wait_for(Stream &stream, const OpPtr &op)
{
    if (op == nullptr || op->stream == &stream)
        return;
    stream.clock.join(op->actor.clock);
    if (!op->done)
        stream.next_waits.push_back(op);
}

OpPtr enqueue(Stream &stream, const Work &work, const std::vector<OpPtr> &waits)
{
    State &s = state();
    order_with_default_stream(stream);
    for (const OpPtr &before : waits)
        wait_for(stream, before);
    auto op = std::make_shared<Op>();
    op->work = work;
    op->stream = &stream;
    op->waits.swap(stream.next_waits);
    stream.clock.join(s.host);
    s.host.tick(kHostClock); // what the host does next is not ordered before this operation
    op->actor.epoch = stream.clock.tick(stream.id);
    op->actor.clock = stream.clock;
    op->actor.label = work.label + " on " + stream.name;
    if (op->work.queued)
        op->work.queued(*op);
    stream.queue.push_back(op);
    stream.tail = op;
    s.busy[stream.id] = &stream;
    if (s.schedule == SIM_THREAD)
        s.changed.notify_all();
    return op;
}

CUresult submit(Stream &stream, const Work &work, Lock &lock)
{
    if (const CUresult refused = capture_refuses(stream))
        return refused;
    if (stream.capture) {
        capture_node(stream, work);
        return CUDA_SUCCESS;
    }
    enqueue(stream, work);
    progress(lock);
    return CUDA_SUCCESS;
}

// Runs one operation of some ready stream.
static bool advance(bool delayed, Lock &lock)
{
    const auto ready = ready_streams(delayed);
    if (ready.empty())
        return false;
    run_front(*ready[state().random() % ready.size()], lock);
    return true;
}

int step(int n, Lock &lock)
{
    int done = 0;
    while (done < n && (advance(false, lock) || advance(true, lock)))
        done++;
    return done;
}

void progress(Lock &lock)
{
    State &s = state();
    if (s.schedule == SIM_EAGER)
        drain(lock);
    else if (s.schedule == SIM_RANDOM)
        for (uint64_t n = s.random() % 3; n > 0 && advance(false, lock); n--) {
        }
}

// A query is no wait, but a loop of queries must come to an end.
void poll(const OpPtr &op, Lock &lock)
{
    State &s = state();
    progress(lock);
    if (op && !op->done && s.schedule == SIM_LAZY && s.random() % 4 == 0)
        force(op, lock);
}

// Runs one operation that `op` needs, following waits to their origin.
static void run_towards(const OpPtr &op, Lock &lock)
{
    State &s = state();
    OpPtr target = op;
    for (;;) {
        const OpPtr front = target->stream->queue.front();
        if (front->running) { // another host thread is at it
            s.changed.wait(lock);
            return;
        }
        OpPtr missing;
        for (const OpPtr &before : front->waits)
            if (!before->done)
                missing = before;
        if (missing == nullptr)
            return run_front(*front->stream, lock);
        target = missing;
    }
}

void force(const OpPtr &op, Lock &lock)
{
    State &s = state();
    while (op && !op->done) {
        if (s.schedule == SIM_THREAD)
            s.changed.wait(lock);
        else if (s.schedule != SIM_RANDOM || !advance(false, lock))
            run_towards(op, lock);
    }
}

void drain(Lock &lock)
{
    while (!state().busy.empty()) {
        const OpPtr tail = state().busy.begin()->second->tail;
        force(tail, lock);
    }
}

void host_waits_for(const OpPtr &op, Lock &lock)
{
    if (op == nullptr)
        return;
    force(op, lock);
    host_join(op->actor.clock);
}

void start_background_thread()
{
    if (background_started)
        return;
    background_started = true;
    std::thread(background, state().random()).detach();
}

// What the parent had queued is the parent's; waiting for it here would take for ever.
void child_after_fork()
{
    State &s = state();
    background_started = false;
    s.schedule = SIM_EAGER;
    for (const auto &[id, stream] : s.busy)
        stream->queue.clear();
    s.busy.clear();
}

} // namespace sim
