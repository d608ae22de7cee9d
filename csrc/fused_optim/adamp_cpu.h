// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

// apex_npu::adamp_, see apex_npu/ops/segmented.py. Rows must be ranges of memory: `ids` is not read, and
// `direction` is for devices that need it.
void adamp_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& model_param, const at::Tensor& direction,
               const at::Tensor& starts, const at::Tensor& lengths, const std::optional<at::Tensor>& ids,
               const at::Tensor& owner, const at::Tensor& row_limit, const at::Tensor& whole_limit, double lr,
               double beta1, double beta2, double eps, double weight_decay, double wd_ratio, bool nesterov,
               bool maximize, int64_t step, const std::optional<at::Tensor>& grad_scale);

}  // namespace apex_npu
