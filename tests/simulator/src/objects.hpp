// What driver handles stand for.  Objects stay allocated after they were destroyed, marked dead, so that a late use of
// the handle is found; a reset frees them.
#pragma once

#include <cuda.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "clock.hpp"
#include "history.hpp"
#include "ptx.hpp"

namespace sim {

using Lock = std::unique_lock<std::mutex>;

struct Context;
struct Device;
struct Op;
struct Stream;
using OpPtr = std::shared_ptr<Op>;

// One operation as the caller described it.  It may be run many times: graphs replay it.
struct Work {
    std::string label;
    std::function<void(Op &)> queued; // at the call (and at every replay): what the driver takes from the host then
    std::function<void(Op &, Lock &)> run; // on the stream; may release the lock
};

// One execution of a Work.
struct Op {
    Work work;
    Stream *stream = nullptr;
    Actor actor;
    std::vector<OpPtr> waits; // done before this one starts; earlier work of the stream is implied
    std::vector<uint8_t> staged;
    bool running = false, done = false;
};

// A node of a graph under capture.  `lane` is the stream it was captured from: one stream's nodes run in order.
struct Node {
    Work work;
    uint32_t lane = 0;
    std::vector<size_t> after;
};

struct Capture {
    unsigned long long id = 0;
    Stream *origin = nullptr;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    bool invalid = false, ended = false;
    std::vector<Node> nodes;
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
    Context *context = nullptr;
    std::string name;
    unsigned flags = 0;
    int priority = 0;
    uint32_t id = 0; // also the number of its clock
    bool legacy = false, internal = false, dead = false;
    VectorClock clock;
    std::deque<OpPtr> queue;
    OpPtr tail;                    // the last operation queued, done or not
    std::vector<OpPtr> next_waits; // of other streams, before the next operation
    CapturePtr capture;
    std::vector<size_t> capture_tail; // nodes that the next captured operation comes after

    bool blocking() const { return !legacy && !(flags & CU_STREAM_NON_BLOCKING); }
};

struct Event {
    Context *context = nullptr;
    unsigned flags = 0;
    bool dead = false;
    OpPtr record;       // the last record outside capture
    CapturePtr capture; // set when the last record was inside one
    std::vector<size_t> capture_tail;
};

struct Function;

struct Module {
    Context *context = nullptr;
    bool dead = false;
    std::unique_ptr<ptx::Module> code;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Function {
    Module *module = nullptr;
    ptx::Entry *entry = nullptr;
    int max_dynamic_shared = 48 * 1024;
};

struct Graph {
    Context *context = nullptr;
    bool dead = false;
    std::vector<Node> nodes;
};

struct GraphExec {
    Context *context = nullptr;
    bool dead = false;
    std::vector<Node> nodes;
    std::map<uint32_t, Stream *> lanes;
};

struct Context {
    Device *device = nullptr;
    int references = 0;
    CUresult sticky = CUDA_SUCCESS; // the error that every later call returns
    Stream *legacy = nullptr;
};

struct Device {
    int ordinal = 0;
    int capability = 90;
    Context primary;
};

} // namespace sim
