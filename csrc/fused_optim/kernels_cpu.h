// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels in this folder as those of the operators that apex_npu/ops declares.
#pragma once

#include <torch/library.h>

namespace apex_npu {

// Registers on construction, unregisters on destruction: nothing is registered by loading the library. The operators
// must have been defined, and have a CompositeExplicitAutograd kernel, which takes what these do not.
class KernelsCpu {
 public:
  KernelsCpu();

 private:
  torch::Library library_;
};

}  // namespace apex_npu
