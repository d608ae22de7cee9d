// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

// apex_npu::sgd_ and its overload `encoded`, see apex_npu/ops/elementwise.py.
void sgd_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
             const std::optional<at::Tensor>& momentum_buffer, double lr, double momentum, double dampening,
             double weight_decay, bool nesterov, bool maximize, int64_t step, bool decoupled,
             const std::optional<at::Tensor>& grad_scale);

}  // namespace apex_npu
