// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fused_optim/adadelta_cpu.h"
#include "fused_optim/adagrad_cpu.h"
#include "fused_optim/adam_cpu.h"
#include "fused_optim/adamp_cpu.h"
#include "fused_optim/grad_list.h"
#include "fused_optim/lamb_cpu.h"
#include "fused_optim/norm_cpu.h"
#include "fused_optim/rmsprop_cpu.h"
#include "fused_optim/segments_cpu.h"
#include "fused_optim/sgd_cpu.h"

namespace apex_npu {
namespace {

// A kernel, and before it the question whether it is one for these arguments; else the reference is called.
class OrReference final : public c10::OperatorKernel {
 public:
  explicit OrReference(c10::KernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    if (is_for_reference(op.schema(), *stack)) {
      // It would be refused there, too, but in words about storage.
      for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
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
  static bool is_for_reference(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    const auto arguments = torch::jit::last(stack, schema.arguments().size());
    const auto dtype_of = [&](const char* name) -> std::optional<at::ScalarType> {
      const auto index = schema.argumentIndexWithName(name);
      if (!index.has_value() || !arguments[*index].isTensor()) return std::nullopt;
      return arguments[*index].toTensor().scalar_type();
    };
    // Elements that are no ranges of memory, and float64 beside anything else.
    if (dtype_of("ids").has_value()) return true;
    return dtype_of("param") == at::kDouble && (dtype_of("grad") != at::kDouble || dtype_of("model_param").has_value());
  }

  c10::KernelFunction kernel_;
};

// The overload of an update rule that takes several runs: the default one, called for each. Lists hold what differs
// between runs; one that is empty stands for an operand that there is none of.
class EachRun final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) const {
    const auto one = c10::Dispatcher::singleton().findSchemaOrThrow(op.schema().name().c_str(), "");
    const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
    const size_t count = arguments.front().toTensorList().size();
    torch::jit::Stack each;
    for (size_t i = 0; i < count; ++i) {
      each.clear();
      for (const c10::IValue& argument : arguments) each.push_back(of_run(argument, i));
      one.callBoxed(each);
    }
  }

 private:
  static c10::IValue of_run(const c10::IValue& argument, size_t i) {
    if (argument.isTensorList()) {
      const auto tensors = argument.toTensorList();
      return tensors.empty() ? c10::IValue() : c10::IValue(tensors.get(i));
    }
    if (argument.isDoubleList()) return argument.toDoubleList().get(i);
    if (argument.isIntList()) return argument.toIntList().get(i);
    return argument;
  }
};

template <typename Function>
void implement(torch::Library& library, const char* name, Function* function) {
  auto kernel = std::make_unique<OrReference>(c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
  library.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

}  // namespace

KernelsCpu::KernelsCpu() : library_(torch::Library::IMPL, "apex_npu", c10::DispatchKey::CPU, __FILE__, __LINE__) {
  implement(library_, "sgd_", sgd_cpu);
  implement(library_, "adam_", adam_cpu);
  implement(library_, "rmsprop_", rmsprop_cpu);
  implement(library_, "adadelta_", adadelta_cpu);
  implement(library_, "adagrad_", adagrad_cpu);
  implement(library_, "lamb_", lamb_cpu);
  implement(library_, "adamp_", adamp_cpu);
  implement(library_, "segment_dot", segment_dot_cpu);
  implement(library_, "segment_add_", segment_add_cpu);
  implement(library_, "norm", norm_cpu);
  for (const char* name : {"sgd_.runs", "adam_.runs", "rmsprop_.runs", "adadelta_.runs", "adagrad_.runs"}) {
    library_.impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<EachRun>()));
  }
}

}  // namespace apex_npu
