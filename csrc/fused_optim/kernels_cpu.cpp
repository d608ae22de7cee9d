// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fused_optim/adadelta_cpu.h"
#include "fused_optim/adagrad_cpu.h"
#include "fused_optim/adam_cpu.h"
#include "fused_optim/grad_list.h"
#include "fused_optim/lamb_cpu.h"
#include "fused_optim/norm_cpu.h"
#include "fused_optim/rmsprop_cpu.h"
#include "fused_optim/segments_cpu.h"
#include "fused_optim/sgd_cpu.h"

namespace apex_npu {
namespace {

// Calls a kernel if it supports the arguments, else the reference.
class OrReference final : public c10::OperatorKernel {
 public:
  OrReference(c10::KernelFunction kernel, const c10::FunctionSchema& schema)
      : kernel_(std::move(kernel)),
        count_(schema.arguments().size()),
        ids_(schema.argumentIndexWithName("ids")),
        param_(schema.argumentIndexWithName("param")),
        grad_(schema.argumentIndexWithName("grad")) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    if (is_for_reference(*stack)) {
      // The reference would also refuse it, but with a message about storage.
      for (const c10::IValue& argument : torch::jit::last(*stack, count_)) {
        TORCH_CHECK_TYPE(
            !argument.isTensor() || grad_list_of(argument.toTensor()) == nullptr, op.schema().name(),
            ": with ids, and beside parameters in float64 those in another dtype, gradients must be flat and "
            "contiguous, not a list; gather them first");
      }
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    } else {
      kernel_.callBoxed(op, keys, stack);
    }
  }

 private:
  bool is_for_reference(const torch::jit::Stack& stack) const {
    const auto arguments = torch::jit::last(stack, count_);
    const auto dtype_of = [&](std::optional<int> index) -> std::optional<at::ScalarType> {
      if (!index.has_value() || !arguments[*index].isTensor()) return std::nullopt;
      return arguments[*index].toTensor().scalar_type();
    };
    // Segments that are not ranges of memory, and float64 together with another dtype.
    if (dtype_of(ids_).has_value()) return true;
    return dtype_of(param_) == at::kDouble && dtype_of(grad_) != at::kDouble;
  }

  c10::KernelFunction kernel_;
  size_t count_;  // of arguments, and where these are among them
  std::optional<int> ids_, param_, grad_;
};

// The overload of an update rule for several runs: calls the default overload for each. Lists hold the arguments that
// differ between runs; an empty list stands for a missing operand.
class EachRun final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    const auto one = c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "");
    const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    const size_t count = arguments.front().toListRef().size();
    torch::jit::Stack each;
    for (size_t i = 0; i < count; ++i) {
      each.clear();
      for (const c10::IValue& argument : arguments) each.push_back(of_run(argument, i));
      one.callBoxed(each);
    }
  }

 private:
  static c10::IValue of_run(const c10::IValue& argument, size_t i) {
    if (!argument.isList()) return argument;
    const auto values = argument.toListRef();
    return values.empty() ? c10::IValue() : values[i];
  }
};

// The kernels of a rule, made from a function that takes an encoding before the declared arguments.
template <auto kFunction>
struct Kernels;

template <typename... Args, void (*kFunction)(const Encoding&, Args...)>
struct Kernels<kFunction> {
  static void plain(Args... args) { kFunction(Encoding::none(), args...); }

  static void encoded(Args... args, const std::optional<at::Tensor>& remainder, at::TensorList scales,
                      const at::Tensor& table, int64_t count, bool stochastic_param) {
    kFunction(Encoding(remainder, scales, table, count, stochastic_param), args...);
  }
};

template <typename Function>
void implement(torch::Library& library, const std::string& name, Function* function, const std::string& overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("apex_npu::" + name).c_str(), overload.c_str());
  auto kernel =
      std::make_unique<OrReference>(c10::KernelFunction::makeFromUnboxedRuntimeFunction(function), op.schema());
  const std::string full_name = overload.empty() ? name : name + "." + overload;
  library.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

template <auto kFunction>
void implement_rule(torch::Library& library, const std::string& name) {
  implement(library, name, &Kernels<kFunction>::plain);
  implement(library, name, &Kernels<kFunction>::encoded, "encoded");
}

}  // namespace

KernelsCpu::KernelsCpu() : library_(torch::Library::IMPL, "apex_npu", c10::DispatchKey::CPU, __FILE__, __LINE__) {
  implement_rule<&sgd_cpu>(library_, "sgd_");
  implement_rule<&adam_cpu>(library_, "adam_");
  implement_rule<&rmsprop_cpu>(library_, "rmsprop_");
  implement_rule<&adadelta_cpu>(library_, "adadelta_");
  implement_rule<&adagrad_cpu>(library_, "adagrad_");
  implement_rule<&lamb_cpu>(library_, "lamb_");
  implement(library_, "segment_dot", segment_dot_cpu);
  implement(library_, "segment_add_", segment_add_cpu);
  implement(library_, "norm", norm_cpu);
  for (const char* name :
       {"sgd_.runs", "adam_.runs", "rmsprop_.runs", "adadelta_.runs", "adagrad_.runs", "lamb_.runs"}) {
    library_.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<EachRun>()));
  }
}

}  // namespace apex_npu
