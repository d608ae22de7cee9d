// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/adagrad_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Adagrad {
  Gradient<T> gradient;
  T keep, lr, eps;

  APEX_NPU_INLINE void operator()(T* p, const T* g, States<T> states, int64_t n) const {
    T* s = states[0];
    const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
      const T grad = gradient(g[i], p[i]);
      s[i] += grad * grad;
      p[i] = keep * p[i] - lr * grad / (std::sqrt(s[i]) + eps);
    };
    for_each<T>(n, body, p, g, s);
  }
};

}  // namespace

void adagrad_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& square_sum, const std::optional<at::Tensor>& model_param, double lr, double eps,
                 double weight_decay, bool decoupled, bool maximize, const std::optional<at::Tensor>& grad_scale) {
  const State s("square_sum", square_sum);
  const Operands operands("adagrad_", param, grad, model_param, grad_scale, maximize, {s}, encoding);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    Adagrad<T> rule;
    rule.gradient = operands.gradient<T>(decoupled ? 0 : weight_decay);
    rule.keep = static_cast<T>(decoupled ? 1 - lr * weight_decay : 1);
    rule.lr = static_cast<T>(lr);
    rule.eps = static_cast<T>(eps);
    update_elements<T>(operands, rule);
  });
}

}  // namespace apex_npu
