// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// torch.autocast("npu"): the cast lists are those that torch offers to all devices; the casts are made on boxed
// arguments, so that one function serves a whole list.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <vector>

#include "npu.h"

namespace npu_simulator {
namespace {

namespace autocast = at::autocast;
using Stack = torch::jit::Stack;

constexpr auto kAutocast = c10::DispatchKey::AutocastPrivateUse1;

size_t first_argument(const c10::OperatorHandle& op, const Stack& stack) {
  return stack.size() - op.schema().arguments().size();
}

void cast_all(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  for (size_t i = first_argument(op, *stack); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = autocast::cached_cast(dtype, value.toTensor(), kNpu);
    } else if (value.isTensorList()) {
      const std::vector<at::Tensor> list = value.toTensorVector();
      value = autocast::cached_cast(dtype, at::TensorList(list), kNpu);
    }
  }
}

void lower_precision_fp(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kAutocast);
  cast_all(op, stack, autocast::get_lower_precision_fp_from_device_type(kNpu));
  op.callBoxed(stack);
}

void fp32(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kAutocast);
  cast_all(op, stack, at::kFloat);
  op.callBoxed(stack);
}

bool first_is_eligible(const c10::OperatorHandle& op, const Stack& stack) {
  const c10::IValue& first = stack[first_argument(op, stack)];
  return first.isTensor() && first.toTensor().defined() && autocast::is_eligible(first.toTensor(), kNpu);
}

// The operator can accumulate in another type than its input's: fp32, unless the caller chose.
void fp32_set_opt_dtype(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kAutocast);
  if (first_is_eligible(op, *stack)) {
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[first_argument(op, *stack) + i];
      if (arguments[i].name() == "dtype" && value.isNone()) value = at::kFloat;
    }
  }
  op.callBoxed(stack);
}

// norm's overloads without a dtype become those with one.
void norm_append_dtype(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kAutocast);
  const bool whole = op.operator_name().overload_name == "Scalar";
  const size_t first = first_argument(op, *stack);
  const at::Tensor self = (*stack)[first].toTensor();
  const at::ScalarType dtype = first_is_eligible(op, *stack) ? at::kFloat : self.scalar_type();
  stack->emplace_back(dtype);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("aten::norm", whole ? "ScalarOpt_dtype" : "ScalarOpt_dim_dtype")
      .callBoxed(stack);
}

void promote(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(kAutocast);
  at::ScalarType dtype = autocast::get_lower_precision_fp_from_device_type(kNpu);
  for (size_t i = first_argument(op, *stack); i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) dtype = autocast::prioritize(dtype, value.toTensor(), kNpu);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) dtype = autocast::prioritize(dtype, tensor, kNpu);
    }
  }
  cast_all(op, stack, dtype);
  op.callBoxed(stack);
}

void refuse_binary_cross_entropy(const c10::OperatorHandle& /*op*/, Stack* /*stack*/) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: their input is a"
              " probability, which float16 rounds to 0 or 1. Use binary_cross_entropy_with_logits or"
              " torch.nn.BCEWithLogitsLoss, which are safe, or call it inside torch.autocast('npu', enabled=False)");
}

#define NPU_SIMULATOR_NAME1(name) "aten::" #name
#define NPU_SIMULATOR_NAME2(name, overload) "aten::" #name "." #overload
#define NPU_SIMULATOR_PICK(_1, _2, macro, ...) macro
#define NPU_SIMULATOR_NAME(...) NPU_SIMULATOR_PICK(__VA_ARGS__, NPU_SIMULATOR_NAME2, NPU_SIMULATOR_NAME1)(__VA_ARGS__),

}  // namespace

void register_autocast() {
  using torch::CppFunction;
  using torch::Library;
  static auto* rest = new Library(Library::IMPL, "_", kAutocast, __FILE__, __LINE__);
  static auto* aten = new Library(Library::IMPL, "aten", kAutocast, __FILE__, __LINE__);
  rest->fallback(CppFunction::makeFallthrough());
  for (const char* name : {AT_FORALL_LOWER_PRECISION_FP(NPU_SIMULATOR_NAME)}) {
    aten->impl(name, CppFunction::makeFromBoxedFunction<&lower_precision_fp>());
  }
  for (const char* name : {AT_FORALL_FP32(NPU_SIMULATOR_NAME)}) {
    aten->impl(name, CppFunction::makeFromBoxedFunction<&fp32>());
  }
  for (const char* name : {AT_FORALL_FP32_SET_OPT_DTYPE(NPU_SIMULATOR_NAME)}) {
    aten->impl(name, CppFunction::makeFromBoxedFunction<&fp32_set_opt_dtype>());
  }
  for (const char* name : {AT_FORALL_PROMOTE(NPU_SIMULATOR_NAME)}) {
    aten->impl(name, CppFunction::makeFromBoxedFunction<&promote>());
  }
  for (const char* name : {"aten::norm.Scalar", "aten::norm.ScalarOpt_dim"}) {
    aten->impl(name, CppFunction::makeFromBoxedFunction<&norm_append_dtype>());
  }
  aten->impl("aten::binary_cross_entropy", CppFunction::makeFromBoxedFunction<&refuse_binary_cross_entropy>());
}

}  // namespace npu_simulator
