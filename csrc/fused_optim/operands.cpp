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
                   const std::optional<at::Tensor>& model_param, const std::optional<at::Tensor>& grad_scale,
                   bool maximize, std::initializer_list<State> states)
    : grad_list_(grad_list_of(grad)), maximize_(maximize) {
  std::vector<Named> buffers = {{"param", &param, true}};
  for (const State& state : states) {
    if (state.tensor != nullptr) buffers.push_back({state.name, state.tensor, true});
  }
  const size_t state_end = buffers.size();
  if (model_param.has_value()) buffers.push_back({"model_param", &*model_param, true});

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
    TORCH_CHECK_TYPE(buffers[i].tensor->scalar_type() == state_dtype, op, ": ", buffers[i].name, " must be ",
                     state_dtype, " beside ", param_dtype_, " parameters, got ", buffers[i].tensor->scalar_type());
  }
  if (model_param.has_value()) {
    model_dtype_ = model_param->scalar_type();
    TORCH_CHECK_TYPE(!is_double() && (model_dtype_ == at::kHalf || model_dtype_ == at::kBFloat16), op,
                     ": model_param must be float16 or bfloat16 and param not float64, got ", model_dtype_, " beside ",
                     param_dtype_);
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
  if (grad_list_ == nullptr) grad_ = grad.const_data_ptr();
  model_param_ = model_param.has_value() ? model_param->mutable_data_ptr() : nullptr;
  if (model_param_ != nullptr && param_dtype_ == at::kFloat) copies_ = rounded_copy_of(*model_param);
  if (copies_ != nullptr) first_copy_ = copies_->offset_of(model_param_, numel_);
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
  if (param_dtype_ == at::kFloat) {
    float* const data = static_cast<float*>(param_) + begin;
    if (copies_ != nullptr) {
      copies_->take(data, static_cast<const uint16_t*>(model_param_) + begin, first_copy_ + begin, n);
    }
    return data;
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

template <>
void Operands::write_back(int64_t begin, int64_t n, const float* param) const {
  if (param_dtype_ != at::kFloat) narrow(param, static_cast<uint16_t*>(param_) + begin, param_dtype_, n);
  if (copies_ != nullptr) {
    copies_->write(param, static_cast<uint16_t*>(model_param_) + begin, first_copy_ + begin, n);
  } else if (model_param_ != nullptr) {
    narrow(param, static_cast<uint16_t*>(model_param_) + begin, model_dtype_, n);
  }
}

}  // namespace apex_npu
