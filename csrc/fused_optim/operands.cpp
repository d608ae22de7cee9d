// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/operands.h"

#include <vector>

#include "fused_optim/convert.h"

namespace apex_npu {
namespace {

struct Named {
  const char* name;
  const at::Tensor* tensor;
  bool written;
};

void check_place(const char* op, const Named& buffer, const at::Tensor& param) {
  const at::Tensor& t = *buffer.tensor;
  TORCH_CHECK_VALUE(t.defined() && t.layout() == c10::kStrided && t.device().is_cpu(), op, ": ", buffer.name,
                    " must be a dense tensor on the cpu, like param, got ", t.toString());
  TORCH_CHECK_VALUE(t.dim() == 1 && t.is_contiguous(), op, ": ", buffer.name,
                    " must be flat and contiguous, got shape ", t.sizes(), " with strides ", t.strides());
  TORCH_CHECK_VALUE(t.numel() == param.numel(), op, ": all buffers must have one length, but ", buffer.name, " has ",
                    t.numel(), " elements and param ", param.numel());
}

bool is_encoded_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kChar || dtype == at::kByte;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  return a.numel() != 0 && a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes();
}

void check_apart(const char* op, const GradList& grads, const std::vector<Named>& buffers) {
  for (const Named& buffer : buffers) {
    const auto* begin = static_cast<const char*>(buffer.tensor->const_data_ptr());
    const auto* end = begin + buffer.tensor->nbytes();
    for (size_t i = 0; i < grads.places().size(); ++i) {
      const ListedGrad& place = grads.places()[i];
      TORCH_CHECK_VALUE(place.data + place.nbytes() <= begin || end <= place.data, op, ": grad, the ", i, "-th of its ",
                        grads.places().size(), " parts, and ", buffer.name, " overlap in memory");
    }
  }
}

void check_apart(const char* op, const std::vector<Named>& buffers) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      TORCH_CHECK_VALUE(!(buffers[i].written || buffers[j].written) || !overlap(*buffers[i].tensor, *buffers[j].tensor),
                        op, ": ", buffers[j].name, " and ", buffers[i].name, " overlap in memory");
    }
  }
}

}  // namespace

Operands::Operands(const char* op, const at::Tensor& param, const at::Tensor& grad,
                   const std::optional<at::Tensor>& grad_scale, bool maximize, std::initializer_list<State> states,
                   const Encoding& encoding)
    : encoding_(encoding), grad_list_(grad_list_of(grad)), maximize_(maximize) {
  std::vector<Named> buffers = {{"param", &param, true}};
  for (const State& state : states) {
    if (state.tensor != nullptr) buffers.push_back({state.name, state.tensor, true});
  }
  const size_t state_end = buffers.size();
  if (encoding.remainder().has_value()) buffers.push_back({"remainder", &*encoding.remainder(), true});
  if (grad_list_ == nullptr) buffers.push_back({"grad", &grad, false});

  for (const Named& buffer : buffers) check_place(op, buffer, param);
  TORCH_CHECK_VALUE(grad.numel() == param.numel(), op, ": all buffers must have one length, but grad has ",
                    grad.numel(), " elements and param ", param.numel());
  param_dtype_ = param.scalar_type();
  grad_dtype_ = grad.scalar_type();
  TORCH_CHECK_TYPE(is_float(param_dtype_), op, ": param must be float16, bfloat16, float32 or float64, got ",
                   param_dtype_);
  TORCH_CHECK_TYPE(is_float(grad_dtype_) && is_double() == (grad_dtype_ == at::kDouble), op, ": grad is ", grad_dtype_,
                   " beside ", param_dtype_, " parameters; float64 goes with float64 only");
  const at::ScalarType state_dtype = is_double() ? at::kDouble : at::kFloat;
  for (size_t i = 1; i < state_end; ++i) {
    const bool encoded = encoding.given() && !is_double() && is_encoded_dtype(buffers[i].tensor->scalar_type());
    TORCH_CHECK_TYPE(encoded || buffers[i].tensor->scalar_type() == state_dtype, op, ": ", buffers[i].name, " must be ",
                     state_dtype, " beside ", param_dtype_, " parameters, got ", buffers[i].tensor->scalar_type());
  }
  check_apart(op, buffers);
  if (grad_list_ != nullptr) check_apart(op, *grad_list_, buffers);
  if (grad_scale.has_value()) {
    TORCH_CHECK_VALUE(grad_scale->device().is_cpu() && grad_scale->numel() == 1, op,
                      ": grad_scale must be one number on the cpu, got shape ", grad_scale->sizes(), " on ",
                      grad_scale->device());
    TORCH_CHECK_TYPE(grad_scale->scalar_type() == at::kFloat || grad_scale->scalar_type() == at::kDouble, op,
                     ": grad_scale must be float32 or float64, got ", grad_scale->scalar_type());
    grad_scale_ = grad_scale->scalar_type() == at::kFloat ? *grad_scale->const_data_ptr<float>()
                                                          : *grad_scale->const_data_ptr<double>();
  }

  numel_ = param.numel();
  param_ = param.mutable_data_ptr();
  int k = 0;
  for (const State& state : states) {
    if (state.tensor != nullptr) states_[k] = {state.tensor->mutable_data_ptr(), state.tensor->scalar_type()};
    ++k;
  }
  if (encoding.given()) check_encoding(op, states);
  if (grad_list_ == nullptr) grad_ = grad.const_data_ptr();
}

void Operands::check_encoding(const char* op, std::initializer_list<State> states) {
  TORCH_CHECK_TYPE(!is_double(), op, ": states of float64 parameters cannot be encoded");
  TORCH_CHECK_VALUE(encoding_.end() <= numel_, op, ": table has elements up to ", encoding_.end(), ", param has ",
                    numel_);
  size_t next = 0;
  int k = 0;
  for (const State& state : states) {
    StateBuffer& buffer = states_[k++];
    if (buffer.dtype != at::kChar && buffer.dtype != at::kByte) continue;
    TORCH_CHECK_VALUE(next < encoding_.scales().size(), op, ": ", state.name, " is ", buffer.dtype,
                      " and has no scales");
    const at::Tensor& scales = encoding_.scales()[next++];
    TORCH_CHECK_VALUE(scales.device().is_cpu() && scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
                          scales.numel() >= encoding_.scale_count(),
                      op, ": the scales of ", state.name, " must be float32 on the cpu, ", encoding_.scale_count(),
                      " at least, got ", scales.numel(), " of ", scales.toString());
    buffer.scales = scales.mutable_data_ptr<float>();
  }
  const bool has_remainder = encoding_.remainder().has_value();
  TORCH_CHECK_TYPE(!encoding_.stochastic_param() || param_dtype_ == at::kBFloat16, op,
                   ": stochastic rounding is for bfloat16 parameters, got ", param_dtype_);
  TORCH_CHECK_TYPE(!has_remainder || param_dtype_ == at::kBFloat16 || param_dtype_ == at::kHalf, op,
                   ": remainders are for bfloat16 and float16 parameters, got ", param_dtype_);
  TORCH_CHECK_VALUE(!(has_remainder && encoding_.stochastic_param()), op,
                    ": parameters with remainders are not rounded stochastically");
  if (has_remainder) {
    const at::Tensor& remainder = *encoding_.remainder();
    TORCH_CHECK_TYPE(remainder.scalar_type() == at::kShort || remainder.scalar_type() == at::kChar, op,
                     ": remainder must be int16 or int8, got ", remainder.scalar_type());
    if (remainder.scalar_type() == at::kShort) {
      remainder_ = remainder.mutable_data_ptr<int16_t>();
    } else {
      byte_remainder_ = remainder.mutable_data_ptr<int8_t>();
    }
  }
}

template <>
double* Operands::param(int64_t begin, int64_t /*n*/, double* /*copy*/) const {
  return static_cast<double*>(param_) + begin;
}

template <>
const double* Operands::grad(int64_t begin, int64_t n, double* copy) const {
  if (grad_list_ != nullptr) return grad_list_->read(begin, n, copy);
  return static_cast<const double*>(grad_) + begin;
}

template <>
void Operands::write_back(int64_t /*begin*/, int64_t /*n*/, const double* /*param*/) const {}

template <>
float* Operands::param(int64_t begin, int64_t n, float* copy) const {
  if (param_dtype_ == at::kFloat) return static_cast<float*>(param_) + begin;
  if (remainder_ != nullptr) {
    decode_remainder(static_cast<uint16_t*>(param_) + begin, param_dtype_, remainder_ + begin, copy, n);
    return copy;
  }
  if (byte_remainder_ != nullptr) {
    decode_remainder(static_cast<uint16_t*>(param_) + begin, param_dtype_, byte_remainder_ + begin, copy, n);
    return copy;
  }
  widen(static_cast<const uint16_t*>(param_) + begin, param_dtype_, copy, n);
  return copy;
}

template <>
const float* Operands::grad(int64_t begin, int64_t n, float* copy) const {
  if (grad_list_ != nullptr) return grad_list_->read(begin, n, copy);
  if (grad_dtype_ == at::kFloat) return static_cast<const float*>(grad_) + begin;
  widen(static_cast<const uint16_t*>(grad_) + begin, grad_dtype_, copy, n);
  return copy;
}

const BFloat16* Operands::narrow_grad(int64_t begin, int64_t n) const {
  if (grad_list_ != nullptr) return grad_list_->narrow(begin, n);
  return grad_dtype_ == at::kBFloat16 ? static_cast<const BFloat16*>(grad_) + begin : nullptr;
}

template <>
void Operands::write_back(int64_t begin, int64_t n, const float* param) const {
  if (remainder_ != nullptr) {
    encode_remainder(param, static_cast<uint16_t*>(param_) + begin, param_dtype_, remainder_ + begin, n);
  } else if (param_dtype_ != at::kFloat) {
    narrow(param, static_cast<uint16_t*>(param_) + begin, param_dtype_, n);
  }
}

void Operands::write_back_stochastically(int64_t begin, int64_t n, const float* param,
                                         const RandomWords& random) const {
  if (byte_remainder_ != nullptr) {
    void* place = static_cast<uint16_t*>(param_) + begin;
    encode_remainder(param, place, param_dtype_, byte_remainder_ + begin, random, n);
  } else {
    narrow_stochastically(param, narrow_param(begin), random, n);
  }
}

}  // namespace apex_npu
