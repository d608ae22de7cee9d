// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "report.h"

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "acl/acl.h"

namespace host_cann {
namespace {

struct Row {
  long calls = 0;
  size_t bytes = 0;
};

struct Report {
  std::mutex lock;
  std::map<std::string, Row> rows;  // by "launch aclnnAdd f32 f32 f32", "copy h2d", "wait stream"
  std::set<std::string> rows_ever, not_found, missing;
  std::string last_message;
};

Report& report() {
  static auto* made = new Report;
  return *made;
}

void append_line(const char* variable, const std::string& line) {
  const char* file = getenv(variable);
  if (!file) return;
  if (FILE* out = fopen(file, "a")) {
    fprintf(out, "%s\n", line.c_str());
    fclose(out);
  }
}

void count(const std::string& row, size_t bytes) {
  static const bool tracing = getenv("HOST_CANN_TRACE") != nullptr;
  if (tracing) fprintf(stderr, "[host CANN] %s %zu\n", row.c_str(), bytes);
  Report& r = report();
  std::lock_guard<std::mutex> guard(r.lock);
  // Each kind of call once a process: for a look at all of them, over many processes.
  static const bool listing = getenv("HOST_CANN_ROWS") != nullptr;
  if (listing && r.rows_ever.insert(row).second) append_line("HOST_CANN_ROWS", row);
  Row& counted = r.rows[row];
  ++counted.calls;
  counted.bytes += bytes;
}

size_t copy_text(const std::string& text, char* out, size_t room) {
  if (text.size() < room) memcpy(out, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

bool begins_with(const char* text, const char* beginning) { return !strncmp(text, beginning, strlen(beginning)); }

}  // namespace

const char* chip() {
  static const char* name = getenv("HOST_CANN_SOC");
  return name ? name : "Ascend910B1";
}

bool saturates() {
  return begins_with(chip(), "Ascend910") && !begins_with(chip(), "Ascend910B") && !begins_with(chip(), "Ascend910_9");
}

void count_launch(const std::string& name, const std::string& dtypes, size_t bytes) {
  count("launch " + name + " " + dtypes, bytes);
}
void count_copy(const char* direction, size_t bytes) { count(std::string("copy ") + direction, bytes); }
void count_wait(const char* on) { count(std::string("wait ") + on, 0); }

int fail(int code, const std::string& message) {
  {
    std::lock_guard<std::mutex> guard(report().lock);
    report().last_message = "host CANN: " + message;
  }
  static const bool quiet = getenv("HOST_CANN_QUIET") != nullptr;
  if (!quiet) fprintf(stderr, "[host CANN] error %d: %s\n", code, message.c_str());
  return code;
}

int not_implemented(const std::string& name) {
  {
    std::lock_guard<std::mutex> guard(report().lock);
    if (report().missing.insert(name).second) append_line("HOST_CANN_NOT_FOUND", name);
  }
  return fail(ACL_ERROR_API_NOT_SUPPORT, name + " is not implemented by the host CANN");
}

bool takes_dtype(const std::string& name, const std::string& dtype) {
  static const auto* table = [] {
    auto* made = new std::map<std::string, std::set<std::string>>;
    const char* file = getenv("HOST_CANN_DTYPES");
    std::ifstream in(file ? file : "");
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      std::string op, type;
      words >> op;
      while (words >> type) (*made)[op].insert(type);
    }
    return made;
  }();
  const auto found = table->find(name);
  return found == table->end() || found->second.count(dtype);
}

}  // namespace host_cann

using namespace host_cann;

extern "C" {

const char* aclGetRecentErrMsg() {
  static thread_local std::string shown;
  std::lock_guard<std::mutex> guard(report().lock);
  shown.swap(report().last_message);
  report().last_message.clear();
  return shown.c_str();
}

void aclAppLog(aclLogLevel level, const char*, const char*, uint32_t, const char* format, ...) {
  char line[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::lock_guard<std::mutex> guard(report().lock);
  // Among much else torch_npu logs here which operators it has looked for in vain.
  if (const char* begin = strstr(line, "dlsym aclnn")) {
    begin += strlen("dlsym ");
    const std::string name(begin, strcspn(begin, " "));
    const bool is_plan = name.find("GetWorkspaceSize") != std::string::npos;
    if (!is_plan && report().not_found.insert(name).second) append_line("HOST_CANN_NOT_FOUND", name);
  }
  append_line("HOST_CANN_LOG", std::to_string(level) + " " + line);
}

// ---- for tests, by way of ctypes ----

void host_cann_reset_counts() {
  std::lock_guard<std::mutex> guard(report().lock);
  report().rows.clear();
}

// A wait that the counting itself has made.
void host_cann_uncount_wait(const char* on) {
  std::lock_guard<std::mutex> guard(report().lock);
  --report().rows[std::string("wait ") + on].calls;
}

// Lines "calls bytes name". Returns how many bytes the text takes; it is written where there is room for it.
size_t host_cann_counts(char* out, size_t room) {
  std::lock_guard<std::mutex> guard(report().lock);
  std::string text;
  for (const auto& [name, row] : report().rows) {
    text += std::to_string(row.calls) + " " + std::to_string(row.bytes) + " " + name + "\n";
  }
  return copy_text(text, out, room);
}

// Lines "called NAME", of what has failed for being missing, and "sought NAME", of what torch_npu has looked for in
// vain.
size_t host_cann_missing(char* out, size_t room) {
  std::lock_guard<std::mutex> guard(report().lock);
  std::string text;
  for (const std::string& name : report().missing) text += "called " + name + "\n";
  for (const std::string& name : report().not_found) text += "sought " + name + "\n";
  return copy_text(text, out, room);
}

int host_cann_saturates() { return saturates(); }
}
