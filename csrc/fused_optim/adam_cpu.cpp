// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/adam_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Adam {
  Gradient<T> gradient;
  T keep, beta1, beta1_rest, beta2, beta2_rest, eps, step_size, root_factor;
  bool forgetful;

  APEX_NPU_INLINE void operator()(T* p, const T* g, States<T> states, int64_t n) const {
    T *m = states[0], *v = states[1], *v_max = states[2];
    if (v_max == nullptr) {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T square = update_moments(gradient(g[i], p[i]), m[i], v[i]);  // before m[i] is read below
        move(p[i], m[i], square);
      };
      for_each<T>(n, body, p, g, m, v);
    } else {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T square = update_moments(gradient(g[i], p[i]), m[i], v[i]);
        v_max[i] = v_max[i] >= square || v_max[i] != v_max[i] ? v_max[i] : square;  // nan stays
        move(p[i], m[i], v_max[i]);
      };
      for_each<T>(n, body, p, g, m, v, v_max);
    }
  }

  APEX_NPU_INLINE T update_moments(T grad, T& m, T& v) const {
    // From the nearer end, as torch's lerp: else beta1 = 0 would not forget a huge m.
    m = forgetful ? grad + beta1 * (m - grad) : m + beta1_rest * (grad - m);
    v = beta2 * v + beta2_rest * grad * grad;
    return v;
  }

  APEX_NPU_INLINE void move(T& p, T m, T square) const {
    p = keep * p - step_size * m / (std::sqrt(square) * root_factor + eps);
  }
};

}  // namespace

void adam_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq,
              const std::optional<at::Tensor>& model_param, double lr, double beta1, double beta2, double eps,
              double weight_decay, bool decoupled, bool maximize, int64_t step, bool bias_correction,
              const std::optional<at::Tensor>& grad_scale) {
  const State m("exp_avg", exp_avg), v("exp_avg_sq", exp_avg_sq), v_max("max_exp_avg_sq", max_exp_avg_sq);
  const Operands operands("adam_", param, grad, model_param, grad_scale, maximize, {m, v, v_max}, encoding);
  const double correction1 = bias_correction ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = bias_correction ? 1 - std::pow(beta2, step) : 1;
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    Adam<T> rule;
    rule.gradient = operands.gradient<T>(decoupled ? 0 : weight_decay);
    rule.keep = static_cast<T>(decoupled ? 1 - lr * weight_decay : 1);
    rule.beta1 = static_cast<T>(beta1);
    rule.forgetful = beta1 <= 0.5;
    rule.beta1_rest = static_cast<T>(1 - beta1);
    rule.beta2 = static_cast<T>(beta2);
    rule.beta2_rest = static_cast<T>(1 - beta2);
    rule.eps = static_cast<T>(eps);
    rule.step_size = static_cast<T>(lr / correction1);
    rule.root_factor = static_cast<T>(1 / std::sqrt(correction2));
    update_elements<T>(operands, rule);
  });
}

}  // namespace apex_npu
