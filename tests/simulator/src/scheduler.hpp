// Streams and the order in which their work runs.  All with the lock held; those that take it may release it meanwhile.
#pragma once

#include <string>

#include "objects.hpp"

namespace sim {

Stream *make_stream(Context *context, unsigned flags, int priority, const std::string &name);

// The stream behind a handle (NULL and the legacy handle: the current context's default stream), NULL when it is dead.
Stream *find_stream(CUstream handle);

// Puts work at the end of a stream, after `waits` too.  Not for streams under capture.
OpPtr enqueue(Stream &stream, const Work &work, const std::vector<OpPtr> &waits = {});

// What every asynchronous call does with its work: a node of the graph under capture, or queued and perhaps run.
CUresult submit(Stream &stream, const Work &work, Lock &lock);

// Orders the next operation of the stream after `op`.
void wait_for(Stream &stream, const OpPtr &op);

void progress(Lock &lock);               // what the schedule does at every call
void poll(const OpPtr &op, Lock &lock);  // what it does at a query
void force(const OpPtr &op, Lock &lock); // returns when the operation is done
void drain(Lock &lock);                  // returns when nothing is queued
int step(int n, Lock &lock);
void host_waits_for(const OpPtr &op, Lock &lock); // a synchronising call: force, and the host knows

void start_background_thread();
void child_after_fork(); // the background thread is gone

} // namespace sim
