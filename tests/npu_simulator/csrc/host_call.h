// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One operator of the device, run by the CPU's kernel on the same bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <string>
#include <vector>

#include "npu.h"

namespace npu_simulator {

// What is asked about an operator on each call, found out once.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);
  // Operators come and go with torch.library: another one may have its schema at the same address.
  bool is_of(const c10::OperatorHandle& op) const {
    return op_name == op.operator_name() && written.size() == op.schema().arguments().size();
  }

  c10::OperatorName op_name;

  std::string name;           // without "aten::"
  std::vector<bool> written;  // per argument: changed in place
  int generator_arg = -1;
  int index_arg = -1;            // indices or targets: the CPU's kernels take int64 alone, an NPU's int32, too
  int bias_arg = -1;             // a bias, which on an NPU may be float32 where ...
  int like_arg = -1;             // ... this argument is float16 or bfloat16
  bool draws_unasked = false;    // random, but its schema has no Generator to pass
  bool launches = true;          // false for views and questions about metadata
  bool syncs = false;            // the host has to wait for a value or for a shape
  bool syncs_for_masks = false;  // ... but only if it gets boolean indices
  bool takes_host_tensors = false;
  bool one_launch_per_tensor = false;
  std::atomic<int64_t> launched{0};
};
OpInfo& op_info(const c10::OperatorHandle& op);

using HostKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Runs `kernel`, which sees CPU tensors on the stack, for an operator that has npu tensors there.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::DispatchKey host_key, HostKernel kernel);

// The boxed kernel that every operator of the device gets unless it is registered explicitly.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace npu_simulator
