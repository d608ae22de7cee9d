// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Registers the kernels in this folder for the operators that apex_npu/ops declares.
#pragma once

#include <torch/library.h>

namespace apex_npu {

// Registers on construction, and unregisters on destruction. Loading the library registers nothing. The operators must
// be defined, with a CompositeExplicitAutograd kernel for arguments that these kernels do not support.
class KernelsCpu {
 public:
  KernelsCpu();

 private:
  torch::Library library_;
};

}  // namespace apex_npu
