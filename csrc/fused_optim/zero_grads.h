// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Zeroes, or checks for zeros, the gradients of many tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Calls tensor.grad.zero_() for each gradient with dense memory on the cpu. Returns the indices of the tensors with
// other gradients.
std::vector<int64_t> zero_grads_cpu(const Borrowed& tensors);

// Returns whether all gradients of `tensors` are dense memory on the cpu with 0 in every bit. Stops at the first that
// is not.
bool are_zero_grads_cpu(const Borrowed& tensors);

}  // namespace apex_npu
