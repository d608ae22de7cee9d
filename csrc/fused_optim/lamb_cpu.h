// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

// apex_npu::lamb_, see apex_npu/ops/segmented.py. `direction` and `ids` are for devices that need them.
void lamb_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const at::Tensor& direction, const at::Tensor& starts,
              const at::Tensor& lengths, const std::optional<at::Tensor>& ids, double lr, double beta1, double beta2,
              double beta3, double eps, int64_t step, bool bias_correction, double l2, double decay, bool adapt,
              double max_weight_norm, bool maximize, const std::optional<at::Tensor>& grad_scale);

}  // namespace apex_npu
