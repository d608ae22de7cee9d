// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/rmsprop_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct RmsProp {
  Gradient<T> gradient;
  // Of eps and lr, one of each pair does nothing (0 or 1): that is what the options choose.
  T keep, alpha, alpha_rest, eps_inside, eps_outside, momentum, lr_inside, lr_outside;

  APEX_NPU_INLINE void operator()(T* p, const T* g, States<T> states, int64_t n) const {
    T *s = states[0], *a = states[1], *b = states[2];
    const bool centered = a != nullptr, has_momentum = b != nullptr;
    if (!centered && !has_momentum) {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T grad = gradient(g[i], p[i]);
        move(p[i], direction(grad, blend_square(grad, s[i])));
      };
      for_each<T>(n, body, p, g, s);
    } else if (!centered) {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T grad = gradient(g[i], p[i]);
        move(p[i], blend_momentum(direction(grad, blend_square(grad, s[i])), b[i]));
      };
      for_each<T>(n, body, p, g, s, b);
    } else if (!has_momentum) {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T grad = gradient(g[i], p[i]);
        move(p[i], direction(grad, blend_square(grad, s[i]) - blend_mean(grad, a[i])));
      };
      for_each<T>(n, body, p, g, s, a);
    } else {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T grad = gradient(g[i], p[i]);
        const T variance = blend_square(grad, s[i]) - blend_mean(grad, a[i]);
        move(p[i], blend_momentum(direction(grad, variance), b[i]));
      };
      for_each<T>(n, body, p, g, s, a, b);
    }
  }

  APEX_NPU_INLINE T blend_square(T grad, T& s) const { return s = alpha * s + alpha_rest * grad * grad; }

  // The square of the mean.
  APEX_NPU_INLINE T blend_mean(T grad, T& a) const {
    a += alpha_rest * (grad - a);
    return a * a;
  }

  APEX_NPU_INLINE T direction(T grad, T variance) const {
    return lr_inside * grad / (std::sqrt(variance + eps_inside) + eps_outside);
  }

  APEX_NPU_INLINE T blend_momentum(T direction, T& b) const { return b = momentum * b + direction; }

  APEX_NPU_INLINE void move(T& p, T direction) const { p = keep * p - lr_outside * direction; }
};

}  // namespace

void rmsprop_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& square_avg, const std::optional<at::Tensor>& grad_avg,
                 const std::optional<at::Tensor>& momentum_buffer, const std::optional<at::Tensor>& model_param,
                 double lr, double alpha, double eps, double weight_decay, double momentum, bool eps_inside_sqrt,
                 bool decoupled, bool lr_in_momentum, bool maximize, const std::optional<at::Tensor>& grad_scale) {
  const State s("square_avg", square_avg), a("grad_avg", grad_avg), b("momentum_buffer", momentum_buffer);
  const Operands operands("rmsprop_", param, grad, model_param, grad_scale, maximize, {s, a, b}, encoding);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    RmsProp<T> rule;
    rule.gradient = operands.gradient<T>(decoupled ? 0 : weight_decay);
    rule.keep = static_cast<T>(decoupled ? 1 - weight_decay : 1);
    rule.alpha = static_cast<T>(alpha);
    rule.alpha_rest = static_cast<T>(1 - alpha);
    rule.eps_inside = static_cast<T>(eps_inside_sqrt ? eps : 0);
    rule.eps_outside = static_cast<T>(eps_inside_sqrt ? 0 : eps);
    rule.momentum = static_cast<T>(momentum);
    rule.lr_inside = static_cast<T>(lr_in_momentum ? lr : 1);
    rule.lr_outside = static_cast<T>(lr_in_momentum ? 1 : lr);
    update_elements<T>(operands, rule);
  });
}

}  // namespace apex_npu
