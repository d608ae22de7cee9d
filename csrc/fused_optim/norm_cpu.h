// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace apex_npu {

// apex_npu::norm, see apex_npu/ops/segmented.py.
at::Tensor norm_cpu(const at::Tensor& x);

}  // namespace apex_npu
