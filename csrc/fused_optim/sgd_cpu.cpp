// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Sgd {
  Gradient<T> gradient;
  T keep, lr, momentum, grad_share;
  bool nesterov, first;

  template <typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void operator()(Param p, Grad g, Buffers states, int64_t n) const {
    const auto b = get<0>(states);
    if (!has<0>(states)) {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i];
        p[i] = keep * param - lr * gradient(g[i], param);
      };
      for_each<T>(n, body, p, g);
      return;
    }
    const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
      const T param = p[i], grad = gradient(g[i], param);
      const T mean = select<T>(first, grad, momentum * b[i] + grad_share * grad);
      b[i] = mean;
      p[i] = keep * param - lr * select(nesterov, grad_share * grad + momentum * mean, mean);
    };
    for_each<T>(n, body, p, g, b);
  }
};

}  // namespace

void sgd_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
             const std::optional<at::Tensor>& momentum_buffer, double lr, double momentum, double dampening,
             double weight_decay, bool nesterov, bool maximize, int64_t step, bool decoupled,
             const std::optional<at::Tensor>& grad_scale) {
  const State buffer("momentum_buffer", momentum_buffer);
  const Operands operands("sgd_", param, grad, grad_scale, maximize, {buffer}, encoding);
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
