// Stream capture and graphs.
#include "capture.hpp"
#include "entry.hpp"
#include "scheduler.hpp"
#include "state.hpp"

using namespace sim;

namespace {

CUstreamCaptureStatus status_of(const Stream &stream)
{
    if (!stream.capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream.capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult instantiate(CUgraphExec *out, CUgraph handle)
{
    const Graph *graph = lookup(state().graphs, handle);
    if (graph == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    auto exec = std::make_unique<GraphExec>();
    exec->context = graph->context;
    exec->nodes = graph->nodes;
    *out = reinterpret_cast<CUgraphExec>(adopt(state().execs, std::move(exec)));
    return CUDA_SUCCESS;
}

} // namespace

extern "C" {

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode)
{
    SIM_CALL(cuStreamBeginCapture, kUsual);
    Stream *stream = find_stream(handle);
    return stream ? capture_begin(*stream, mode) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *out)
{
    SIM_CALL(cuStreamEndCapture, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = nullptr;
    auto graph = std::make_unique<Graph>();
    graph->context = stream->context;
    if (const CUresult failed = capture_end(*stream, graph->nodes))
        return failed;
    *out = reinterpret_cast<CUgraph>(adopt(state().graphs, std::move(graph)));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    SIM_CALL(cuStreamIsCapturing, kUsual);
    Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (const CUresult refused = capture_refuses(*stream); refused == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return refused;
    *status = status_of(*stream);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
    SIM_CALL(cuStreamGetCaptureInfo, kUsual);
    const Stream *stream = find_stream(handle);
    if (stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (graph || dependencies || edges || count) {
        report("UNSIMULATED", "cuStreamGetCaptureInfo beyond status and id");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *status = status_of(*stream);
    if (id && stream->capture)
        *id = stream->capture->id;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    SIM_CALL(cuThreadExchangeStreamCaptureMode, kInit);
    *mode = exchange_capture_mode(*mode);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *out, CUgraph graph, unsigned long long)
{
    SIM_CALL(cuGraphInstantiate, kUsual);
    return instantiate(out, graph);
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *)
{
    SIM_CALL(cuGraphInstantiateWithParams, kUsual);
    return instantiate(out, graph);
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream_handle)
{
    SIM_CALL(cuGraphLaunch, kUsual);
    GraphExec *exec = lookup(state().execs, handle);
    Stream *stream = find_stream(stream_handle);
    if (exec == nullptr || stream == nullptr)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        report("UNSIMULATED", "a graph launch inside a capture");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    replay(*exec, *stream);
    progress(call.lock);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle)
{
    SIM_CALL(cuGraphDestroy, kTeardown);
    Graph *graph = lookup(state().graphs, handle);
    if (graph == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    graph->dead = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle)
{
    SIM_CALL(cuGraphExecDestroy, kTeardown);
    GraphExec *exec = lookup(state().execs, handle);
    if (exec == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    exec->dead = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    SIM_CALL(cuGraphGetNodes, kInit);
    const Graph *graph = lookup(state().graphs, handle);
    if (graph == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    if (nodes) {
        report("UNSIMULATED", "cuGraphGetNodes beyond their number");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *count = graph->nodes.size();
    return CUDA_SUCCESS;
}

} // extern "C"
