// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Streams are queues of work with a thread each, events are places in them, and graphs are queues that are kept.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "acl/acl.h"

namespace host_cann {

using Work = std::function<void()>;
struct Stream;

// When work is done that has been given to a stream (HOST_CANN_MODE).
enum class Mode {
  kLazy,        // as late as can be: a missing wait is found, every time
  kBackground,  // while the host goes on
  kBlocking,    // before the call returns
};
Mode mode();

// An entry of a queue. Tickets count the entries of one stream from 1.
struct Item {
  Work work;
  Stream* after = nullptr;  // the stream whose entry `ticket` has to be done first
  uint64_t ticket = 0;
};

struct Graph {
  std::vector<Work> work;
  bool open = false;  // it is being captured
};

struct Stream {
  int device = 0, id = 0;
  std::mutex lock;
  std::condition_variable more, progress;
  std::deque<Item> queue;
  uint64_t submitted = 0, done = 0, wanted = 0;  // tickets
  bool has_thread = false;
  // From the entry that failed to the one at which the host was told, nothing was done.
  int error = 0, last_error = 0;
  uint64_t failed_from = 0, failed_until = 0;  // 0: no entry
  Graph* capturing = nullptr;
};

struct Event {
  Stream* stream = nullptr;  // none: it has not been recorded
  uint64_t ticket = 0;
  int queries = 0;
  Graph* captured = nullptr;
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
};

int current_device();  // of this thread; -1: none is set
Stream* make_stream(int device);
Stream* stream_of(aclrtStream handle);  // of a null handle the default stream of the current device
// `work` throws where it fails. The stream then does no more until the host has been told, when it next waits. With
// `now` it is begun at once in all modes.
void submit(Stream* stream, Work work, bool now = false);
int synchronize(Stream* stream, double timeout_ms = -1);  // returns the error of what has failed
int synchronize_device(int device, double timeout_ms = -1);
bool is_idle(Stream* stream);

void record(Event* event, Stream* stream);
void wait_event(Stream* stream, Event* event);
int synchronize_event(const Event* event);
bool is_complete(Event* event);

Graph* begin_capture(Stream* stream);
Graph* end_capture(Stream* stream);
void execute(Graph* graph, Stream* stream);
void destroy(Graph* graph);

// Calls `deallocate` once all work that was submitted so far is done.
void deallocate_later(std::function<void()> deallocate);

}  // namespace host_cann
