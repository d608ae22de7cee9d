// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "stream.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "injection.h"
#include "report.h"

namespace host_cann {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::duration<double, std::milli>;

// A script that never waits is not to fill the memory with work: no more than this waits to be begun.
constexpr uint64_t kMostWaiting = 10000;

struct Deallocation {
  std::vector<std::pair<Stream*, uint64_t>> after;
  std::function<void()> deallocate;
};

// Never destroyed: the streams' threads may run while the process ends.
struct Registry {
  std::mutex lock;
  std::vector<Stream*> streams;
  std::map<int, Stream*> defaults;  // by device
  std::deque<Deallocation> deallocations;
  int graphs = 0;  // what they use is kept: they may run again
};

Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

double now_ms() { return Milliseconds(Clock::now().time_since_epoch()).count(); }

// The error of the stream's entry `ticket`, where it failed or was left out because one before it had; the caller has
// the stream's lock.
int error_of(const Stream* stream, uint64_t ticket) {
  const bool failed = stream->failed_from && stream->failed_from <= ticket;
  return failed && (!stream->failed_until || ticket <= stream->failed_until) ? stream->last_error : 0;
}

// Begins the entries up to `ticket` and waits for them. False: not within the time; negative times have no end.
bool wait_until(Stream* stream, uint64_t ticket, double timeout_ms = -1) {
  std::unique_lock<std::mutex> guard(stream->lock);
  if (stream->wanted < ticket) {
    stream->wanted = ticket;
    stream->more.notify_one();
  }
  const auto is_done = [&] { return stream->done >= ticket; };
  if (timeout_ms >= 0) return stream->progress.wait_for(guard, Milliseconds(timeout_ms), is_done);
  stream->progress.wait(guard, is_done);
  return true;
}

// Does one entry; returns its error.
int perform(const Item& item, bool is_broken) {
  try {
    if (item.after) {
      wait_until(item.after, item.ticket);
      // What waits for something that has failed has no use of what that was to bring: it fails, too.
      std::lock_guard<std::mutex> guard(item.after->lock);
      if (const int error = error_of(item.after, item.ticket)) return error;
    }
    if (item.work && !is_broken) item.work();
  } catch (const Failure& failure) {
    return fail(failure.code, failure.what());
  } catch (const std::exception& error) {
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, error.what());
  }
  return 0;
}

void run(Stream* stream) {
  std::unique_lock<std::mutex> guard(stream->lock);
  for (;;) {
    stream->more.wait(guard, [&] { return !stream->queue.empty() && stream->done < stream->wanted; });
    Item item = std::move(stream->queue.front());
    stream->queue.pop_front();
    const bool is_broken = stream->error != 0;
    guard.unlock();
    const int error = perform(item, is_broken);
    item = {};  // what it holds goes before the host is told that it is done
    guard.lock();
    ++stream->done;
    if (error && !stream->error) {
      stream->error = stream->last_error = error;
      stream->failed_from = stream->done;
      stream->failed_until = 0;
    }
    stream->progress.notify_all();
  }
}

uint64_t push(Stream* stream, Item item, bool now = false) {
  std::unique_lock<std::mutex> guard(stream->lock);
  stream->queue.push_back(std::move(item));
  const uint64_t ticket = ++stream->submitted;
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(run, stream).detach();
  }
  if (now || mode() != Mode::kLazy) stream->wanted = ticket;
  if (ticket > kMostWaiting && stream->wanted < ticket - kMostWaiting) stream->wanted = ticket - kMostWaiting;
  if (stream->wanted > stream->done) stream->more.notify_one();
  if (mode() == Mode::kBlocking) stream->progress.wait(guard, [&] { return stream->done >= ticket; });
  return ticket;
}

Stream* register_stream(int device) {
  auto* stream = new Stream;
  stream->device = device;
  stream->id = static_cast<int>(registry().streams.size()) + 1;
  registry().streams.push_back(stream);
  return stream;
}

bool is_over(const Deallocation& deallocation) {
  for (const auto& [stream, ticket] : deallocation.after) {
    std::lock_guard<std::mutex> guard(stream->lock);
    if (stream->done < ticket) return false;
  }
  return true;
}

void deallocate_what_is_over() {
  std::vector<std::function<void()>> ready;
  {
    Registry& r = registry();
    std::lock_guard<std::mutex> guard(r.lock);
    while (r.graphs == 0 && !r.deallocations.empty() && is_over(r.deallocations.front())) {
      ready.push_back(std::move(r.deallocations.front().deallocate));
      r.deallocations.pop_front();
    }
  }
  for (auto& deallocate : ready) deallocate();
}

}  // namespace

Mode mode() {
  static const Mode chosen = [] {
    const char* text = getenv("HOST_CANN_MODE");
    if (text && !strcmp(text, "background")) return Mode::kBackground;
    if (text && !strcmp(text, "blocking")) return Mode::kBlocking;
    return Mode::kLazy;
  }();
  return chosen;
}

Stream* make_stream(int device) {
  std::lock_guard<std::mutex> guard(registry().lock);
  return register_stream(device);
}

Stream* stream_of(aclrtStream handle) {
  if (handle) return static_cast<Stream*>(handle);
  const int device = current_device() < 0 ? 0 : current_device();
  std::lock_guard<std::mutex> guard(registry().lock);
  Stream*& found = registry().defaults[device];
  if (!found) found = register_stream(device);
  return found;
}

void submit(Stream* stream, Work work, bool now) {
  if (stream->capturing) {
    stream->capturing->work.push_back(std::move(work));
    return;
  }
  push(stream, Item{std::move(work)}, now);
}

int synchronize(Stream* stream, double timeout_ms) {
  if (stream->capturing) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "a stream that is captured cannot be waited for");
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> guard(stream->lock);
    ticket = stream->submitted;
  }
  if (!wait_until(stream, ticket, timeout_ms)) {
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the stream has work left after the time that was given to it");
  }
  int error;
  {
    std::lock_guard<std::mutex> guard(stream->lock);
    error = std::exchange(stream->error, 0);
    if (error) stream->failed_until = stream->done;
  }
  deallocate_what_is_over();
  return error;
}

int synchronize_device(int device, double timeout_ms) {
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> guard(registry().lock);
    streams = registry().streams;
  }
  int first_error = 0;
  for (Stream* stream : streams) {
    if (stream->device != device || stream->capturing) continue;
    const int error = synchronize(stream, timeout_ms);
    if (!first_error) first_error = error;
  }
  return first_error;
}

bool is_idle(Stream* stream) {
  Event now;
  now.stream = stream;
  std::unique_lock<std::mutex> guard(stream->lock);
  now.ticket = stream->submitted;
  guard.unlock();
  return is_complete(&now);
}

void record(Event* event, Stream* stream) {
  event->captured = stream->capturing;
  if (stream->capturing) return;
  const auto stamp = event->milliseconds = std::make_shared<double>(0);
  event->ticket = push(stream, Item{[stamp] { *stamp = now_ms(); }});
  event->stream = stream;
  event->queries = 0;
}

void wait_event(Stream* stream, Event* event) {
  if (event->captured && event->captured->open) {
    stream->capturing = event->captured;  // what forks from a stream that is captured is captured, too
    return;
  }
  if (event->stream && event->stream != stream) push(stream, Item{nullptr, event->stream, event->ticket});
}

int synchronize_event(const Event* event) {
  if (!event->stream) return 0;
  wait_until(event->stream, event->ticket);
  std::lock_guard<std::mutex> guard(event->stream->lock);
  return error_of(event->stream, event->ticket);
}

bool is_complete(Event* event) {
  if (!event->stream) return true;
  {
    std::lock_guard<std::mutex> guard(event->stream->lock);
    if (event->stream->done >= event->ticket) return true;
  }
  // A host that asks in a loop waits: in lazy mode nothing else would begin the work. Not for ever, since it may be
  // stuck.
  constexpr int kPatience = 3;
  constexpr double kTimeoutMs = 1000;
  return ++event->queries > kPatience && wait_until(event->stream, event->ticket, kTimeoutMs);
}

Graph* begin_capture(Stream* stream) {
  std::lock_guard<std::mutex> guard(registry().lock);
  auto* graph = new Graph;
  graph->open = true;
  stream->capturing = graph;
  ++registry().graphs;
  return graph;
}

Graph* end_capture(Stream* stream) {
  std::lock_guard<std::mutex> guard(registry().lock);
  Graph* graph = stream->capturing;
  graph->open = false;
  for (Stream* other : registry().streams) {
    if (other->capturing == graph) other->capturing = nullptr;
  }
  return graph;
}

void execute(Graph* graph, Stream* stream) {
  submit(stream, [graph] {
    for (const Work& work : graph->work) work();
  });
}

void destroy(Graph* graph) {
  std::lock_guard<std::mutex> guard(registry().lock);
  --registry().graphs;
  delete graph;
}

void deallocate_later(std::function<void()> deallocate) {
  std::lock_guard<std::mutex> guard(registry().lock);
  Deallocation entry{{}, std::move(deallocate)};
  for (Stream* stream : registry().streams) {
    std::lock_guard<std::mutex> one(stream->lock);
    if (stream->done < stream->submitted) entry.after.emplace_back(stream, stream->submitted);
  }
  registry().deallocations.push_back(std::move(entry));
}

}  // namespace host_cann
