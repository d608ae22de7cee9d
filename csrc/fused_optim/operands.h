// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The operands of an update rule, which are all checked before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

#include "fused_optim/grad_list.h"
#include "fused_optim/state_codec.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// A state of a rule; it may be missing.
struct State {
  State(const char* name, const at::Tensor& tensor) : name(name), tensor(&tensor) {}
  State(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}

  const char* name;
  const at::Tensor* tensor;
};

inline bool is_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

// The gradient that a rule steps by: unscaled, negated to ascend, with the L2 penalty.
template <typename T>
struct Gradient {
  T factor, l2;
  bool has_l2;  // without this check, inf * 0 would give nan

  APEX_NPU_INLINE T operator()(T grad, T param) const {
    const T scaled = grad * factor;
    return select(has_l2, scaled + l2 * param, scaled);
  }
};

// Flat buffers of one length on the cpu: parameters (float16, bfloat16, float32 or float64), gradients (float64 beside
// float64, else any of the other three), states (float64 beside float64, else float32), and grad_scale, one
// number that gradients are divided by. Gradients may be a list of tensors, too. With an encoding states may also be
// bfloat16, or of 8 bits with scales, and parameters of 16 bits may have remainders.
class Operands {
 public:
  // Raises ValueError or TypeError, with the name of the wrong operand.
  Operands(const char* op, const at::Tensor& param, const at::Tensor& grad, const std::optional<at::Tensor>& grad_scale,
           bool maximize, std::initializer_list<State> states, const Encoding& encoding);

  int64_t numel() const { return numel_; }

  // Calls compute(T()) with the type of the computation: double for float64, else float.
  template <typename Compute>
  void in_its_type(const Compute& compute) const {
    if (is_double()) {
      compute(double());
    } else {
      compute(float());
    }
  }

  template <typename T>
  Gradient<T> gradient(double l2) const {
    return {(maximize_ ? T(-1) : T(1)) / static_cast<T>(grad_scale_), static_cast<T>(l2), l2 != 0};
  }

  const Encoding& encoding() const { return encoding_; }

  // Returns the k-th of the given states, or one without memory.
  const StateBuffer& state(int k) const { return states_[k]; }
  bool is_encoded(int k) const { return states_[k].data != nullptr && !states_[k].is_plain(); }
  // Returns whether all existing states are bfloat16.
  bool are_rounded() const {
    return std::all_of(states_, states_ + kMaxStates,
                       [](const StateBuffer& state) { return state.data == nullptr || state.dtype == at::kBFloat16; });
  }

  // Returns all states, which are not encoded, from element `begin` on.
  template <typename T>
  States<T> states(int64_t begin) const {
    States<T> found;
    for (int k = 0; k < kMaxStates; ++k) {
      auto* data = static_cast<T*>(states_[k].data);
      found.state[k] = data == nullptr ? nullptr : data + begin;
    }
    return found;
  }

  // Returns elements [begin, begin + n), n <= kBlockNumel, as T: in place if they are T, else in `copy`.
  template <typename T>
  T* param(int64_t begin, int64_t n, T* copy) const;
  template <typename T>
  const T* grad(int64_t begin, int64_t n, T* copy) const;

  // Returns n <= kBlockNumel bfloat16 gradients in place; null if they are not in one place, or have another dtype.
  const BFloat16* narrow_grad(int64_t begin, int64_t n) const;

  // Returns whether bfloat16 parameters are encoded, rather than rounded to nearest, and have no copy. Those with
  // remainders of 8 bits have one.
  bool is_bfloat16_encoded() const {
    const bool is_encoded = remainder_ != nullptr || encoding_.stochastic_param();
    return is_encoded && param_dtype_ == at::kBFloat16;
  }
  // Returns whether parameters have remainders of 16 bits, and states are not encoded.
  bool has_remainders_alone() const {
    return remainder_ != nullptr &&
           std::all_of(states_, states_ + kMaxStates, [](const StateBuffer& state) { return state.is_plain(); });
  }
  BFloat16* narrow_param(int64_t begin) const { return static_cast<BFloat16*>(param_) + begin; }
  // Returns the remainders of 16 bits from element `begin` on; null without them.
  int16_t* remainder(int64_t begin) const { return remainder_ == nullptr ? nullptr : remainder_ + begin; }

  // Writes the values that `param` returned, and a rule has changed, to the parameters.
  template <typename T>
  void write_back(int64_t begin, int64_t n, const T* param) const;

  // Returns whether parameters or their remainders are rounded stochastically, and writes them.
  bool rounds_param_stochastically() const { return byte_remainder_ != nullptr || encoding_.stochastic_param(); }
  void write_back_stochastically(int64_t begin, int64_t n, const float* param, const RandomWords& random) const;

 private:
  bool is_double() const { return param_dtype_ == at::kDouble; }

  void check_encoding(const char* op, std::initializer_list<State> states);

  const Encoding& encoding_;
  StateBuffer states_[kMaxStates];
  int16_t* remainder_ = nullptr;
  int8_t* byte_remainder_ = nullptr;
  int64_t numel_;
  void* param_;
  const void* grad_ = nullptr;
  const GradList* grad_list_;  // instead
  double grad_scale_ = 1;
  bool maximize_;
  at::ScalarType param_dtype_, grad_dtype_;
};

}  // namespace apex_npu
