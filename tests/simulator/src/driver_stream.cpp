// Streams and events.
#include "capture.hpp"
#include "entry.hpp"
#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

namespace {

CUresult dead_handle(const char *api, const char *what)
{
    report("MISUSE", std::string(api) + " on a dead or unknown " + what);
    return CUDA_ERROR_INVALID_HANDLE;
}

// Waiting for, or asking about, a stream under capture is an error that spoils the capture.
CUresult refuse_while_capturing(const Stream &stream)
{
    if (!stream.capture)
        return capture_forbids_unsafe_call();
    capture_invalidate(stream.capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_captured(const Event &event)
{
    if (!event.capture)
        return capture_forbids_unsafe_call();
    capture_invalidate(event.capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult create_stream(CUstream *out, unsigned flags, int priority)
{
    if (out == nullptr || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)))
        return CUDA_ERROR_INVALID_VALUE;
    *out = reinterpret_cast<CUstream>(make_stream(current_context(), flags, priority, ""));
    return CUDA_SUCCESS;
}

} // namespace

extern "C" {

CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned flags)
{
    SIM_CALL(cuStreamCreate, kUsual);
    return create_stream(out, flags, 0);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    SIM_CALL(cuStreamCreateWithPriority, kUsual);
    return create_stream(out, flags, priority);
}

CUresult CUDAAPI cuStreamDestroy(CUstream handle)
{
    SIM_CALL(cuStreamDestroy, kTeardown);
    Stream *stream = handle ? find_stream(handle) : nullptr;
    if (stream == nullptr || stream->legacy)
        return dead_handle("cuStreamDestroy", "stream");
    stream->dead = true; // what is queued still runs
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *context)
{
    SIM_CALL(cuStreamGetCtx, kUsual);
    const Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuStreamGetCtx", "stream");
    *context = reinterpret_cast<CUcontext>(stream->context);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority)
{
    SIM_CALL(cuStreamGetPriority, kUsual);
    const Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuStreamGetPriority", "stream");
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned *flags)
{
    SIM_CALL(cuStreamGetFlags, kUsual);
    const Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuStreamGetFlags", "stream");
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamQuery(CUstream handle)
{
    SIM_CALL(cuStreamQuery, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuStreamQuery", "stream");
    if (const CUresult refused = refuse_while_capturing(*stream))
        return refused;
    const OpPtr last = stream->tail;
    poll(last, call.lock);
    if (last && !last->done)
        return CUDA_ERROR_NOT_READY;
    if (last)
        host_join(last->actor.clock);
    return stream->context->sticky;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle)
{
    SIM_CALL(cuStreamSynchronize, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuStreamSynchronize", "stream");
    if (const CUresult refused = refuse_while_capturing(*stream))
        return refused;
    note_blocking();
    if (stream->legacy) // its end means the end of all blocking streams too
        enqueue(*stream, {"synchronize", nullptr, nullptr});
    host_waits_for(stream->tail, call.lock);
    return stream->context->sticky;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags)
{
    SIM_CALL(cuStreamWaitEvent, kUsual);
    Stream *stream = find_stream(handle);
    Event *event = lookup(state().events, event_handle);
    if (stream == nullptr || event == nullptr)
        return dead_handle("cuStreamWaitEvent", stream ? "event" : "stream");
    if (flags) {
        report("UNSIMULATED", "cuStreamWaitEvent with flags");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (event->capture || (stream->capture && event->record))
        return capture_wait(*stream, *event);
    if (!event->record) // never recorded: there is nothing to wait for
        return CUDA_SUCCESS;
    if (const CUresult refused = capture_refuses(*stream))
        return refused;
    // The record that exists now counts, also when the event is recorded again before the wait runs.
    enqueue(*stream, {"wait for an event", nullptr, nullptr}, {event->record});
    progress(call.lock);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned flags)
{
    SIM_CALL(cuEventCreate, kUsual);
    if (out == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_unique<Event>();
    event->context = current_context();
    event->flags = flags;
    *out = reinterpret_cast<CUevent>(adopt(state().events, std::move(event)));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent handle)
{
    SIM_CALL(cuEventDestroy, kTeardown);
    Event *event = lookup(state().events, handle);
    if (event == nullptr)
        return dead_handle("cuEventDestroy", "event");
    event->dead = true; // waits that were made keep what they wait for
    event->record = nullptr;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent handle, CUstream stream_handle)
{
    SIM_CALL(cuEventRecord, kUsual);
    Stream *stream = find_stream(stream_handle);
    Event *event = lookup(state().events, handle);
    if (stream == nullptr || event == nullptr)
        return dead_handle("cuEventRecord", stream ? "event" : "stream");
    if (event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult refused = capture_refuses(*stream))
        return refused;
    event->capture = stream->capture;
    if (stream->capture) {
        event->record = nullptr;
        event->capture_tail = stream->capture_tail;
        return CUDA_SUCCESS;
    }
    event->record = enqueue(*stream, {"record of an event", nullptr, nullptr});
    progress(call.lock);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventQuery(CUevent handle)
{
    SIM_CALL(cuEventQuery, kUsual);
    Event *event = lookup(state().events, handle);
    if (event == nullptr)
        return dead_handle("cuEventQuery", "event");
    if (const CUresult refused = refuse_captured(*event))
        return refused;
    const OpPtr record = event->record;
    poll(record, call.lock);
    if (record && !record->done)
        return CUDA_ERROR_NOT_READY;
    if (record)
        host_join(record->actor.clock);
    return event->context->sticky;
}

CUresult CUDAAPI cuEventSynchronize(CUevent handle)
{
    SIM_CALL(cuEventSynchronize, kUsual);
    Event *event = lookup(state().events, handle);
    if (event == nullptr)
        return dead_handle("cuEventSynchronize", "event");
    if (const CUresult refused = refuse_captured(*event))
        return refused;
    note_blocking();
    const Context *context = event->context;
    host_waits_for(event->record, call.lock);
    return context->sticky;
}

// There is no time here.  The number of operations between the records has the right sign, and that is all.
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent from_handle, CUevent to_handle)
{
    SIM_CALL(cuEventElapsedTime, kUsual);
    const Event *from = lookup(state().events, from_handle), *to = lookup(state().events, to_handle);
    if (from == nullptr || to == nullptr || ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    if (from->record == nullptr || to->record == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!from->record->done || !to->record->done)
        return CUDA_ERROR_NOT_READY;
    const auto host_time = [](const Event &e) { return static_cast<double>(e.record->actor.clock.at(kHostClock)); };
    *milliseconds = static_cast<float>(1e-3 * (host_time(*to) - host_time(*from)));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    SIM_CALL(cuLaunchHostFunc, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return dead_handle("cuLaunchHostFunc", "stream");
    const auto run = [function, data](Op &, Lock &lock) {
        lock.unlock(); // it may wait for the GIL, whose holder may wait for the lock
        function(data);
        lock.lock();
    };
    return submit(*stream, {"host function", nullptr, run}, call.lock);
}

} // extern "C"
