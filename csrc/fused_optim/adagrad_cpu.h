// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

// apex_npu::adagrad_ and its overload `encoded`, see apex_npu/ops/elementwise.py.
void adagrad_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& square_sum, double lr, double eps, double weight_decay, bool decoupled,
                 bool maximize, const std::optional<at::Tensor>& grad_scale);

}  // namespace apex_npu
