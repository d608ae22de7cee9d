// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "amp/overlay.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace apex_npu {
namespace {

namespace autocast = at::autocast;
using torch::jit::Stack;

enum class Policy { kHalf, kFloat, kPromote, kMatchSelf };

Policy policy_named(const std::string& name) {
  if (name == "half") return Policy::kHalf;
  if (name == "float") return Policy::kFloat;
  if (name == "promote") return Policy::kPromote;
  if (name == "match_self") return Policy::kMatchSelf;
  TORCH_CHECK_VALUE(false, "policy must be half, float, promote or match_self, got ", name);
}

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// float64 was requested explicitly, and 8-bit floats have separate scales, so neither is cast.
bool is_cast(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kFloat || is_low_precision(tensor.scalar_type()));
}

// One boxed kernel serves every operator: it casts the tensors among the arguments and calls the operator again, below
// autocast. The key stays excluded ("autocast is off") until the operator returns, so that an operator made of others,
// such as layer_norm or lstm, runs in one precision throughout.
class OverlayKernel final : public c10::OperatorKernel {
 public:
  OverlayKernel(at::DeviceType device_type, Policy policy)
      : device_type_(device_type),
        key_(autocast::get_autocast_dispatch_key_from_device_type(device_type)),
        policy_(policy) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) const {
    const c10::impl::ExcludeDispatchKeyGuard autocast_off(key_);
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    if (const auto dtype = dtype_for(op.schema(), arguments)) {
      const size_t first = stack->size() - arguments.size();
      for (size_t i = first; i < stack->size(); ++i) cast((*stack)[i], *dtype);
    }
    op.callBoxed(stack);
  }

 private:
  // Returns the dtype to which the arguments are cast; nullopt: they are not cast.
  std::optional<at::ScalarType> dtype_for(const c10::FunctionSchema& schema,
                                          at::ArrayRef<c10::IValue> arguments) const {
    switch (policy_) {
      case Policy::kHalf:
        // The current dtype, not the overlay's: a user's own bfloat16 block inside O1 casts to bfloat16.
        return autocast::get_autocast_dtype(device_type_);
      case Policy::kFloat:
        if (has_dtype_argument(schema, arguments)) return std::nullopt;
        return at::kFloat;
      case Policy::kPromote:
        return widest(arguments);
      case Policy::kMatchSelf:
        // For an integer tensor nothing is cast, so that torch rejects floats.
        if (!is_cast(arguments[0].toTensor())) return std::nullopt;
        return arguments[0].toTensor().scalar_type();
    }
    return std::nullopt;
  }

  // An explicit dtype takes precedence.
  static bool has_dtype_argument(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      if (argument.kwarg_only() && argument.name() == "dtype" && !arguments[i].isNone()) return true;
    }
    return false;
  }

  static at::ScalarType widest(at::ArrayRef<c10::IValue> arguments) {
    std::optional<at::ScalarType> common;
    for (const c10::IValue& value : arguments) {
      if (!value.isTensor() || !is_cast(value.toTensor())) continue;
      const at::ScalarType dtype = value.toTensor().scalar_type();
      if (common.has_value() && *common != dtype) return at::kFloat;
      common = dtype;
    }
    return common.value_or(at::kFloat);
  }

  void cast(c10::IValue& value, at::ScalarType dtype) const {
    if (value.isTensor()) {
      if (needs_cast(value.toTensor(), dtype)) value = cast(value.toTensor(), dtype);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;  // a new list, because the caller may keep the given one
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(needs_cast(tensor, dtype) ? cast(tensor, dtype) : tensor);
      }
      value = std::move(list);
    }
  }

  bool needs_cast(const at::Tensor& tensor, at::ScalarType dtype) const {
    return is_cast(tensor) && tensor.scalar_type() != dtype;
  }

  at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) const {
    // cached_cast: inside a model's forward a weight is cast once, as by autocast's own kernels.
    return tensor.device().type() == device_type_ ? autocast::cached_cast(dtype, tensor, device_type_)
                                                  : tensor.to(dtype);
  }

  at::DeviceType device_type_;
  c10::DispatchKey key_;
  Policy policy_;
};

// Silences torch's warning that a few operators intentionally override autocast's own kernels.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

Overlay::Overlay(const std::string& device_type, const std::vector<std::pair<std::string, std::string>>& table) {
  const at::DeviceType type = c10::Device(device_type).type();
  const c10::DispatchKey key = autocast::get_autocast_dispatch_key_from_device_type(type);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  library_.emplace(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const auto& [name, policy] : table) {
    auto kernel = std::make_unique<OverlayKernel>(type, policy_named(policy));
    library_->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
}

void Overlay::destroy() { library_.reset(); }

}  // namespace apex_npu
