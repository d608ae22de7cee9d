// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients on their way into a flat buffer: copied, widened, unscaled and checked in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// slots[i] = grads[i] * inv_scale, element by element, in the slots' dtype; where it `adds`, to float32 slots,
// slots[i] += grads[i] * inv_scale, and the sums are checked. found_inf (float32, one element), if given,
// becomes 1 where an element of a gradient is inf or nan; otherwise it stays as it is. A slot and its gradient have one
// shape, but may differ in dtype and strides. The slots must not overlap each other or the gradients.
void gather_cpu(const Borrowed& slots, const Borrowed& grads, double inv_scale,
                const std::optional<at::Tensor>& found_inf, bool adds = false);

// The gradients of `sources`, those that are there, gathered into `slots`, which become the gradients of `params`;
// where autograd leaves a parameter's gradient on another tensor (a master's, on the model's parameter), that is its
// source.
//
// Returns the index of the first gradient that is not dense, or not of the dtype that its parameter needs; nothing
// has been written then. None where all are well.
std::optional<size_t> take_grads_cpu(const Borrowed& sources, const Borrowed& params, const Borrowed& slots,
                                     double inv_scale, const std::optional<at::Tensor>& found_inf);

}  // namespace apex_npu
