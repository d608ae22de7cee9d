// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/sgd_cpu.h"

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Sgd {
  Gradient<T> gradient;
  T keep, lr, momentum, grad_share;
  bool nesterov, first;

  APEX_NPU_INLINE void operator()(T* p, const T* g, States<T> states, int64_t n) const {
    T* b = states[0];
    if (b == nullptr) {
      const auto body = [=, *this](int64_t i)
                            APEX_NPU_INLINE_LAMBDA { p[i] = keep * p[i] - lr * gradient(g[i], p[i]); };
      for_each<T>(n, body, p, g);
      return;
    }
    const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
      const T grad = gradient(g[i], p[i]);
      b[i] = first ? grad : momentum * b[i] + grad_share * grad;
      p[i] = keep * p[i] - lr * (nesterov ? grad_share * grad + momentum * b[i] : b[i]);
    };
    for_each<T>(n, body, p, g, b);
  }
};

}  // namespace

void sgd_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
             const std::optional<at::Tensor>& momentum_buffer, const std::optional<at::Tensor>& model_param, double lr,
             double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, int64_t step,
             bool decoupled, const std::optional<at::Tensor>& grad_scale) {
  const State buffer("momentum_buffer", momentum_buffer);
  const Operands operands("sgd_", param, grad, model_param, grad_scale, maximize, {buffer}, encoding);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    Sgd<T> rule;
    rule.gradient = operands.gradient<T>(decoupled ? 0 : weight_decay);
    rule.keep = static_cast<T>(decoupled ? 1 - lr * weight_decay : 1);
    rule.lr = static_cast<T>(lr);
    rule.momentum = static_cast<T>(momentum);
    rule.grad_share = static_cast<T>(1 - dampening);
    rule.nesterov = nesterov;
    rule.first = step == 1;
    update_elements<T>(operands, rule);
  });
}

}  // namespace apex_npu
