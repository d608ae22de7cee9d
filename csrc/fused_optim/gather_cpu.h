// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many gradients at once: copies them into a flat buffer, and widens, unscales and checks them in the same pass; or
// zeroes them, or looks for zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Computes slots[i] = grads[i] * inv_scale for each element, in the slots' dtype. If `adds`, computes
// slots[i] += grads[i] * inv_scale for float32 slots, and checks the sums. found_inf (float32, one element), if given,
// becomes 1 if an element of a gradient is inf or nan, and else does not change. A slot and its gradient have one
// shape, but may differ in dtype and strides. The slots must not overlap each other or the gradients.
void gather_cpu(const Borrowed& slots, const Borrowed& grads, double inv_scale,
                const std::optional<at::Tensor>& found_inf, bool adds);

// Gathers the existing gradients of `params` into `slots`, which become their gradients.
//
// Returns the index of the first gradient that is not dense, or does not have the dtype that its parameter needs;
// nothing has been written then. Returns nullopt if all gradients have been gathered.
std::optional<size_t> take_grads_cpu(const Borrowed& params, const Borrowed& slots, double inv_scale,
                                     const std::optional<at::Tensor>& found_inf);

// Calls tensor.grad.zero_() for each gradient with dense memory on the cpu. Returns the indices of the tensors with
// other gradients.
std::vector<int64_t> zero_grads_cpu(const Borrowed& tensors);

// Returns whether all gradients of `tensors` are dense memory on the cpu with 0 in every bit. Stops at the first that
// is not.
bool are_zero_grads_cpu(const Borrowed& tensors);

}  // namespace apex_npu
