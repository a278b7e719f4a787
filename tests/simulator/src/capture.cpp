#include "capture.hpp"

#include <algorithm>
#include <set>

#include "scheduler.hpp"
#include "state.hpp"

namespace sim {
namespace {

CUstreamCaptureMode &thread_mode()
{
    static thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    return mode;
}

void add_nodes(std::vector<size_t> &to, const std::vector<size_t> &nodes)
{
    for (size_t node : nodes)
        if (std::find(to.begin(), to.end(), node) == to.end())
            to.push_back(node);
}

// Whether every captured node comes before the origin's end: else a forked stream was not joined.
bool all_joined(const Capture &capture)
{
    std::vector<bool> reached(capture.nodes.size());
    std::vector<size_t> open = capture.origin->capture_tail;
    while (!open.empty()) {
        const size_t node = open.back();
        open.pop_back();
        if (reached[node])
            continue;
        reached[node] = true;
        open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
    }
    return std::find(reached.begin(), reached.end(), false) == reached.end();
}

void leave_capture(const CapturePtr &capture)
{
    for (const auto &[handle, stream] : state().streams) {
        if (stream->capture != capture)
            continue;
        stream->capture = nullptr;
        stream->capture_tail.clear();
    }
}

} // namespace

CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode)
{
    std::swap(mode, thread_mode());
    return mode;
}

void capture_invalidate(const CapturePtr &capture)
{
    if (capture)
        capture->invalid = true;
}

bool capture_is_live(const CapturePtr &capture) { return capture && !capture->ended; }

CUresult capture_refuses(Stream &stream)
{
    if (stream.capture)
        return stream.capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    if (!stream.legacy)
        return CUDA_SUCCESS;
    // The legacy stream would wait for blocking streams, and those cannot be waited for while they are captured.
    for (const auto &[handle, other] : state().streams) {
        if (other->context == stream.context && other->blocking() && other->capture) {
            capture_invalidate(other->capture);
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    return CUDA_SUCCESS;
}

CUresult capture_forbids_unsafe_call()
{
    if (thread_mode() == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    for (const auto &[handle, stream] : state().streams) {
        const CapturePtr &c = stream->capture;
        if (!c || c->origin != stream.get() || c->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
            continue;
        const bool mine = c->thread == std::this_thread::get_id();
        const bool both_global =
            c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (mine || both_global) {
            capture_invalidate(c);
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return CUDA_SUCCESS;
}

void capture_node(Stream &stream, const Work &work)
{
    Capture &c = *stream.capture;
    c.nodes.push_back({work, stream.id, stream.capture_tail});
    stream.capture_tail = {c.nodes.size() - 1};
}

// A wait joins the stream to the event's capture, or adds an edge inside one.  Across a capture's border it is refused.
CUresult capture_wait(Stream &stream, Event &event)
{
    if (event.capture == nullptr) {
        capture_invalidate(stream.capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (event.capture->ended)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (event.capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream.legacy)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream.capture && stream.capture != event.capture) {
        capture_invalidate(stream.capture);
        capture_invalidate(event.capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream.capture = event.capture;
    add_nodes(stream.capture_tail, event.capture_tail);
    return CUDA_SUCCESS;
}

CUresult capture_begin(Stream &stream, CUstreamCaptureMode mode)
{
    if (stream.legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream.capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->id = state().next_capture++;
    capture->origin = &stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    stream.capture = capture;
    return CUDA_SUCCESS;
}

CUresult capture_end(Stream &stream, std::vector<Node> &nodes)
{
    const CapturePtr capture = stream.capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != &stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    CUresult result = CUDA_SUCCESS;
    if (capture->invalid)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!all_joined(*capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    capture->ended = true;
    leave_capture(capture);
    if (result == CUDA_SUCCESS)
        nodes = std::move(capture->nodes);
    return result;
}

// Nodes of one captured stream run on one lane, so replays of the same graph are in order too, as on a device.
void replay(GraphExec &exec, Stream &stream)
{
    const OpPtr begin = enqueue(stream, {"graph launch", nullptr, nullptr});
    std::vector<OpPtr> ops;
    std::set<Stream *> used;
    for (const Node &node : exec.nodes) {
        Stream *&lane = exec.lanes[node.lane];
        if (lane == nullptr) {
            lane = make_stream(exec.context, CU_STREAM_NON_BLOCKING, 0, "graph lane " + std::to_string(node.lane));
            lane->internal = true;
        }
        std::vector<OpPtr> waits{begin};
        for (size_t before : node.after)
            waits.push_back(ops[before]);
        ops.push_back(enqueue(*lane, node.work, waits));
        used.insert(lane);
    }
    std::vector<OpPtr> ends;
    for (const Stream *lane : used)
        ends.push_back(lane->tail);
    enqueue(stream, {"graph end", nullptr, nullptr}, ends);
}

} // namespace sim
