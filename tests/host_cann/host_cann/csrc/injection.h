// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Failures that tests ask for.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace host_cann {

// What work throws to make its stream fail with a code of its own.
struct Failure : std::runtime_error {
  Failure(int code, const std::string& message) : std::runtime_error(message), code(code) {}
  int code;
};

// When a call fails.
enum class Phase : int {
  kCall,    // when it is made: an operator when it is planned
  kLaunch,  // an operator when it is given to its stream
  kRun,     // an operator when its stream comes to it
  kHang,    // the same, after it has kept the stream for some seconds
};

// The code that the call `name` is to return instead of doing its work; 0: it goes on.
int injected(const std::string& name, Phase phase);
// `work`, or what is to fail in its place.
std::function<void()> or_injected(const std::string& name, std::function<void()> work);

}  // namespace host_cann
