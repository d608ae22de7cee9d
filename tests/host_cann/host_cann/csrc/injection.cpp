// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "injection.h"

#include <chrono>
#include <mutex>
#include <thread>

#include "report.h"

namespace host_cann {
namespace {

// One at a time: a test asks for one failure, and sees what comes of it.
struct Injection {
  std::mutex lock;
  std::string prefix;
  Phase phase = Phase::kCall;
  long passes = 0, times = 0;  // how many calls succeed first, and how many fail then
  int code = 0;
  double seconds = 0;
};

Injection& injection() {
  static auto* made = new Injection;
  return *made;
}

// Counts the call; the code where it is one that fails.
int take(const std::string& name, Phase phase) {
  Injection& i = injection();
  std::lock_guard<std::mutex> guard(i.lock);
  if (i.times == 0 || i.phase != phase || name.compare(0, i.prefix.size(), i.prefix) != 0 || i.passes-- > 0) return 0;
  --i.times;
  return i.code;
}

}  // namespace

int injected(const std::string& name, Phase phase) {
  const int code = take(name, phase);
  return code ? fail(code, name + ": a failure that was asked for") : 0;
}

std::function<void()> or_injected(const std::string& name, std::function<void()> work) {
  if (const int code = take(name, Phase::kRun)) {
    return [=] { throw Failure(code, name + ": a failure that was asked for, while it ran"); };
  }
  if (const int code = take(name, Phase::kHang)) {
    const double seconds = injection().seconds;
    return [=] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      throw Failure(code, name + ": it did not end within its time, as was asked for");
    };
  }
  return work;
}

}  // namespace host_cann

// Calls whose names begin with `prefix` fail with `code` in `phase`: `times` of them, after `passes` that do not.
extern "C" void host_cann_fail(const char* prefix, long passes, int code, int phase, double seconds, long times) {
  using namespace host_cann;
  Injection& i = injection();
  std::lock_guard<std::mutex> guard(i.lock);
  i.prefix = prefix;
  i.passes = passes;
  i.code = code;
  i.phase = static_cast<Phase>(phase);
  i.seconds = seconds;
  i.times = times;
}
