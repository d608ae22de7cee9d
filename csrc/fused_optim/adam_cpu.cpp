// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <cmath>

#include "fused_optim/elementwise.h"

namespace apex_npu {
namespace {

template <typename T>
struct Adam {
  Gradient<T> gradient;
  T keep, beta1, beta1_rest, beta2, beta2_rest, eps, step_size, root_factor;
  bool forgetful;

  template <typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void operator()(Param p, Grad g, Buffers states, int64_t n) const {
    // Without the rare options, the constants of the loop stay in registers.
    if (forgetful || gradient.has_l2) {
      step<true>(p, g, states, n);
    } else {
      step<false>(p, g, states, n);
    }
  }

  template <bool kGeneral, typename Param, typename Grad, typename Buffers>
  APEX_NPU_INLINE void step(Param p, Grad g, Buffers states, int64_t n) const {
    const auto m = get<0>(states);
    const auto v = get<1>(states);
    const auto v_max = get<2>(states);
    if (!has<2>(states)) {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i];
        T mean = m[i], square = v[i];
        update_moments<kGeneral>(kGeneral ? gradient(g[i], param) : g[i] * gradient.factor, mean, square);
        m[i] = mean;
        v[i] = square;
        p[i] = moved(param, mean, square);
      };
      for_each<T>(n, body, p, g, m, v);
    } else {
      const auto body = [=, *this](Element i) APEX_NPU_INLINE_LAMBDA {
        const T param = p[i], before = v_max[i];
        T mean = m[i], square = v[i];
        update_moments<kGeneral>(kGeneral ? gradient(g[i], param) : g[i] * gradient.factor, mean, square);
        const T largest = before >= square || before != before ? before : square;  // nan stays
        m[i] = mean;
        v[i] = square;
        v_max[i] = largest;
        p[i] = moved(param, mean, largest);
      };
      for_each<T>(n, body, p, g, m, v, v_max);
    }
  }

  template <bool kGeneral>
  APEX_NPU_INLINE void update_moments(T grad, T& m, T& v) const {
    // From the nearer end, as torch's lerp. Otherwise beta1 = 0 would not remove a huge m.
    m = select(kGeneral && forgetful, grad + beta1 * (m - grad), m + beta1_rest * (grad - m));
    v = beta2 * v + beta2_rest * grad * grad;
  }

  APEX_NPU_INLINE T moved(T p, T m, T square) const {
    return keep * p - step_size * m / (std::sqrt(square) * root_factor + eps);
  }
};

}  // namespace

void adam_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& max_exp_avg_sq, double lr, double beta1,
              double beta2, double eps, double weight_decay, bool decoupled, bool maximize, int64_t step,
              bool bias_correction, const std::optional<at::Tensor>& grad_scale) {
  const State m("exp_avg", exp_avg), v("exp_avg_sq", exp_avg_sq), v_max("max_exp_avg_sq", max_exp_avg_sq);
  const Operands operands("adam_", param, grad, grad_scale, maximize, {m, v, v_max}, encoding);
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
