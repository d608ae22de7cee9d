// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Adagrad {
  Gradient<T> gradient;
  T keep, lr, eps;

  template <typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void operator()(Param p, Grad g, Buffers states, int64_t n) const {
    const auto s = get<0>(states);
    const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
      const T param = p[i], grad = gradient(g[i], param);
      const T sum = s[i] + grad * grad;
      s[i] = sum;
      p[i] = keep * param - lr * grad / (std::sqrt(sum) + eps);
    };
    for_each<T>(n, body, p, g, s);
  }
};

}  // namespace

void adagrad_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& sum,
                 double lr, double eps, double weight_decay, bool decoupled, bool maximize,
                 const std::optional<at::Tensor>& grad_scale) {
  const State s("sum", sum);
  const Operands operands("adagrad_", param, grad, grad_scale, maximize, {s}, encoding);
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
