// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The kernels of ops. apex_npu/ops/elementwise.py and segmented.py have the formulas and the meaning of the arguments,
// which are in the same order. `starts` and `lengths` (int64, host) are the ranges of segments; elements outside of all
// segments do not change. Segments that are not ranges of memory (`ids`) are not supported here.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fused_optim/state_codec.h"

namespace apex_npu {

void adadelta_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                  const at::Tensor& square_avg, const at::Tensor& acc_delta, double lr, double rho, double eps,
                  double weight_decay, bool maximize, const std::optional<at::Tensor>& grad_scale);

void adagrad_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& sum,
                 double lr, double eps, double weight_decay, bool decoupled, bool maximize,
                 const std::optional<at::Tensor>& grad_scale);

void adam_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq, double lr, double beta1,
              double beta2, double eps, double weight_decay, bool decoupled, bool maximize, int64_t step,
              bool bias_correction, const std::optional<at::Tensor>& grad_scale);

void lamb_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const at::Tensor& direction, const at::Tensor& starts,
              const at::Tensor& lengths, const std::optional<at::Tensor>& ids, double lr, double beta1, double beta2,
              double beta3, double eps, int64_t step, bool bias_correction, double l2, double decay, bool adapt,
              double max_weight_norm, bool maximize, const std::optional<at::Tensor>& grad_scale);

void rmsprop_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& square_avg, const std::optional<at::Tensor>& grad_avg,
                 const std::optional<at::Tensor>& momentum_buffer, double lr, double alpha, double eps,
                 double weight_decay, double momentum, bool eps_inside_sqrt, bool decoupled, bool lr_in_momentum,
                 bool maximize, const std::optional<at::Tensor>& grad_scale);

void sgd_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
             const std::optional<at::Tensor>& momentum_buffer, double lr, double momentum, double dampening,
             double weight_decay, bool nesterov, bool maximize, int64_t step, bool decoupled,
             const std::optional<at::Tensor>& grad_scale);

at::Tensor norm_cpu(const at::Tensor& x);

at::Tensor segment_dot_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts,
                           const at::Tensor& lengths);

void segment_add_cpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& factors, const at::Tensor& starts,
                     const at::Tensor& lengths);

// For rules that compute by torch's operators, which decode and encode the states of a whole run in one pass.
// Computes values[i] = stored[i] for the parameters in `table` (see Encoding), and 0
// between them. `stored` is bfloat16, or int8 or uint8 with scales; `values` is float32.
void decode_state_cpu(const at::Tensor& stored, const std::optional<at::Tensor>& scales, const at::Tensor& table,
                      const at::Tensor& values);

// The inverse, rounded by the random bits of step `count` and of the index-th state of a rule. `values` may be
// overwritten.
void encode_state_cpu(const at::Tensor& values, const at::Tensor& stored, const std::optional<at::Tensor>& scales,
                      const at::Tensor& table, int64_t count, int64_t index);

}  // namespace apex_npu
