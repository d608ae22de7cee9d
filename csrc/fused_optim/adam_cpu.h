// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

// apex_npu::adam_ and its overload `encoded`, see apex_npu/ops/elementwise.py.
void adam_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq, double lr, double beta1,
              double beta2, double eps, double weight_decay, bool decoupled, bool maximize, int64_t step,
              bool bias_correction, const std::optional<at::Tensor>& grad_scale);

}  // namespace apex_npu
