// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct RmsProp {
  Gradient<T> gradient;
  // The options select one of each pair of eps and lr; the other one is neutral (0 or 1).
  T keep, alpha, alpha_rest, eps_inside, eps_outside, momentum, lr_inside, lr_outside;

  template <typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void operator()(Param p, Grad g, Buffers states, int64_t n) const {
    const auto s = get<0>(states);
    const auto a = get<1>(states);
    const auto b = get<2>(states);
    const bool centered = has<1>(states), has_momentum = has<2>(states);
    if (!centered && !has_momentum) {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i], grad = gradient(g[i], param);
        p[i] = moved(param, direction(grad, blend_square(grad, s[i])));
      };
      for_each<T>(n, body, p, g, s);
    } else if (!centered) {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i], grad = gradient(g[i], param);
        p[i] = moved(param, blend_momentum(direction(grad, blend_square(grad, s[i])), b[i]));
      };
      for_each<T>(n, body, p, g, s, b);
    } else if (!has_momentum) {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i], grad = gradient(g[i], param);
        p[i] = moved(param, direction(grad, blend_square(grad, s[i]) - blend_mean(grad, a[i])));
      };
      for_each<T>(n, body, p, g, s, a);
    } else {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i], grad = gradient(g[i], param);
        const T variance = blend_square(grad, s[i]) - blend_mean(grad, a[i]);
        p[i] = moved(param, blend_momentum(direction(grad, variance), b[i]));
      };
      for_each<T>(n, body, p, g, s, a, b);
    }
  }

  // Each of these takes a reference to a state, stores its new value, and returns it.
  template <typename Stored>
  APEX_NPU_INLINE T blend_square(T grad, Stored&& s) const {
    const T blended = alpha * s + alpha_rest * grad * grad;
    s = blended;
    return blended;
  }

  // Returns the square of the new value.
  template <typename Stored>
  APEX_NPU_INLINE T blend_mean(T grad, Stored&& a) const {
    const T before = a, mean = before + alpha_rest * (grad - before);
    a = mean;
    return mean * mean;
  }

  APEX_NPU_INLINE T direction(T grad, T variance) const {
    return lr_inside * grad / (std::sqrt(variance + eps_inside) + eps_outside);
  }

  template <typename Stored>
  APEX_NPU_INLINE T blend_momentum(T direction, Stored&& b) const {
    const T blended = momentum * b + direction;
    b = blended;
    return blended;
  }

  APEX_NPU_INLINE T moved(T p, T direction) const { return keep * p - lr_outside * direction; }
};

}  // namespace

void rmsprop_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& square_avg, const std::optional<at::Tensor>& grad_avg,
                 const std::optional<at::Tensor>& momentum_buffer, double lr, double alpha, double eps,
                 double weight_decay, double momentum, bool eps_inside_sqrt, bool decoupled, bool lr_in_momentum,
                 bool maximize, const std::optional<at::Tensor>& grad_scale) {
  const State s("square_avg", square_avg), a("grad_avg", grad_avg), b("momentum_buffer", momentum_buffer);
  const Operands operands("rmsprop_", param, grad, grad_scale, maximize, {s, a, b}, encoding);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    RmsProp<T> rule;
    rule.gradient = operands.gradient<T>(decoupled ? 0 : weight_decay);
    rule.keep = static_cast<T>(decoupled && lr != 0 ? 1 - weight_decay : 1);
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
