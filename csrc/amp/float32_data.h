// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The float32 data of 16-bit parameters while an optimizer steps them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Gives params[i] the data of sources[i]: memory, dtype, sizes, strides and device. The Python object, version counter,
// gradient, hooks and gradient accumulator of a parameter stay; `param.data = source` would replace some of them.
// Returns aliases of the former data, with separate version counters. Passing them as `sources` undoes the call. If a
// parameter cannot take the data, nothing is changed.
std::vector<at::Tensor> swap_data(const Borrowed& params, const Borrowed& sources);

// Copies to the float32 `values` the elements of float16 and bfloat16 `params` that differ from their rounded values.
// Returns the indices of the pairs that it does not support: not on a CPU, or with different layouts.
std::vector<int64_t> take_written_cpu(const Borrowed& values, const Borrowed& params);

}  // namespace apex_npu
