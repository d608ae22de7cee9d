// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Adadelta {
  Gradient<T> gradient;
  T lr, rho, rho_rest, eps;

  template <typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void operator()(Param p, Grad g, Buffers states, int64_t n) const {
    const auto s = get<0>(states);
    const auto a = get<1>(states);
    const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
      const T param = p[i], grad = gradient(g[i], param), before = a[i];
      const T square = rho * s[i] + rho_rest * grad * grad;
      // Two roots, because the quotient of their arguments can overflow.
      const T delta = std::sqrt(before + eps) / std::sqrt(square + eps) * grad;
      s[i] = square;
      a[i] = rho * before + rho_rest * delta * delta;
      p[i] = param - lr * delta;
    };
    for_each<T>(n, body, p, g, s, a);
  }
};

}  // namespace

void adadelta_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                  const at::Tensor& square_avg, const at::Tensor& acc_delta, double lr, double rho, double eps,
                  double weight_decay, bool maximize, const std::optional<at::Tensor>& grad_scale) {
  const State s("square_avg", square_avg), a("acc_delta", acc_delta);
  const Operands operands("adadelta_", param, grad, grad_scale, maximize, {s, a}, encoding);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    Adadelta<T> rule;
    rule.gradient = operands.gradient<T>(weight_decay);
    rule.lr = static_cast<T>(lr);
    rule.rho = static_cast<T>(rho);
    rule.rho_rest = static_cast<T>(1 - rho);
    rule.eps = static_cast<T>(eps);
    update_elements<T>(operands, rule);
  });
}

}  // namespace apex_npu
