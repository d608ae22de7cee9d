// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace apex_npu {

// int64, (256,): how many elements of `x` times `factor` have each binary exponent, in the columns that
// apex_npu/debug/census.py documents. `x` is contiguous float32 on the cpu.
at::Tensor count_exponents_cpu(const at::Tensor& x, double factor);

}  // namespace apex_npu
