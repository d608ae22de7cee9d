// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// O1's overlay: kernels under a device's Autocast dispatch key, for operators that its autocast does not cast.
// apex_npu/autocast/cast_lists.py lists the operators and their policies; the kernels in
// apex_npu/autocast/autocast_ops.py do the same in Python.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace apex_npu {

// Registers on construction, and unregisters in destroy() or on destruction. Loading the library registers nothing.
class Overlay {
 public:
  // `table`: an aten operator, with its overload if it has one ("pow.Scalar"), and "half", "float", "promote"
  // or "match_self".
  Overlay(const std::string& device_type, const std::vector<std::pair<std::string, std::string>>& table);
  void destroy();

 private:
  std::optional<torch::Library> library_;
};

}  // namespace apex_npu
