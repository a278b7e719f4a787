// Stream capture and graphs.
#pragma once

#include "objects.hpp"

namespace sim {

// CUDA_SUCCESS, or why the operation cannot be put on the stream while something is captured.  Refusing invalidates.
CUresult capture_refuses(Stream &stream);
// The same for calls that a capture in global mode forbids to everybody, and in thread-local mode to its own thread.
CUresult capture_forbids_unsafe_call();

void capture_node(Stream &stream, const Work &work);
void capture_invalidate(const CapturePtr &capture);
CUresult capture_wait(Stream &stream, Event &event);
CUresult capture_begin(Stream &stream, CUstreamCaptureMode mode);
CUresult capture_end(Stream &stream, std::vector<Node> &nodes);
bool capture_is_live(const CapturePtr &capture); // begun, not ended

void replay(GraphExec &exec, Stream &stream);

CUstreamCaptureMode exchange_capture_mode(CUstreamCaptureMode mode); // of the calling thread

} // namespace sim
