// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// 16-bit parameters that an optimizer steps in float32.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Gives each of `params` the data of its one of `sources`: memory, dtype, sizes, strides and device. The Python object,
// version counter, gradient, hooks and gradient accumulator of a parameter stay, which `param.data = source` would
// replace in part. Returns aliases of the former data, with version counters of their own; passing them as `sources`
// undoes the call. Nothing is changed if a parameter cannot take the data.
std::vector<at::Tensor> swap_data(const Borrowed& params, const Borrowed& sources);

// Writes the elements of float16 and bfloat16 `params` that differ from the rounded ones of `values`, float32, to
// `values`. Returns the indices of the pairs that are left to the caller: not on a CPU, or laid out differently.
std::vector<int64_t> take_written_cpu(const Borrowed& values, const Borrowed& params);

}  // namespace apex_npu
