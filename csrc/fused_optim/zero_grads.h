// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Zeros for, and in, the gradients of many tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// tensor.grad.zero_(), for each that has a gradient with dense memory of its own on the cpu. Returns the indices of
// those with another.
std::vector<int64_t> zero_grads_cpu(const Borrowed& tensors);

// Whether all gradients of `tensors` are dense memory on the cpu that is 0 in every bit. Stops at the first that is
// not.
bool are_zero_grads_cpu(const Borrowed& tensors);

}  // namespace apex_npu
