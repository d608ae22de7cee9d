// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Operators that the fallback cannot do: memory, copies between devices, views (for speed), and the kernels that torch
// expects of a device and that no CPU has.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "host_call.h"

namespace npu_simulator {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

// ---- memory ------------------------------------------------------------------------------------------------------

c10::DeviceIndex index_of(optional<c10::Device> device) {
  const c10::DeviceIndex index = device && device->has_index() ? device->index() : current_device();
  check_device_index(index);
  return index;
}

Tensor new_tensor(int64_t nbytes, optional<at::ScalarType> dtype, optional<c10::Device> device, optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned, and this one is on npu");
  auto impl = c10::make_intrusive<c10::TensorImpl>(new_storage(nbytes, index_of(device)),
                                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                   c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
  return Tensor(std::move(impl));
}

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> /*layout*/,
             optional<c10::Device> device, optional<bool> pinned, optional<at::MemoryFormat> format) {
  at::detail::check_size_nonnegative(size);
  const size_t itemsize = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)).itemsize();
  Tensor result = new_tensor(static_cast<int64_t>(at::detail::computeStorageNbytesContiguous(size, itemsize)), dtype,
                             device, pinned);
  c10::TensorImpl* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return result;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout> /*layout*/, optional<c10::Device> device, optional<bool> pinned) {
  at::detail::check_size_nonnegative(size);
  const size_t itemsize = c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)).itemsize();
  Tensor result =
      new_tensor(static_cast<int64_t>(at::detail::computeStorageNbytes(size, stride, itemsize)), dtype, device, pinned);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return result;
}

// torch's functions for the CPU ask the storage for its allocator, and so do what is needed here; the guard makes that
// allocator give memory of the right device.
const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
Tensor& set_storage_(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  DeviceGuard guard(source.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}
Tensor& set_whole_storage_(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_(self, std::move(source), 0, {numel}, {});
}
Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty_(Tensor& self) { return set_storage_(self, new_storage(0, self.device().index()), 0, {0}, {}); }
void record_stream(Tensor& /*self*/, c10::Stream /*stream*/) {}

// ---- copies ------------------------------------------------------------------------------------------------------

Tensor on_host(const Tensor& tensor) { return tensor.device().type() == kNpu ? host_alias(tensor) : tensor; }

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  const bool from_npu = self.device().type() == kNpu;
  const bool to_npu = dst.device().type() == kNpu;
  TORCH_CHECK_NOT_IMPLEMENTED((from_npu || self.is_cpu()) && (to_npu || dst.is_cpu()),
                              "npu_simulator: copy_ works between cpu and npu, got ", self.device(), " and ",
                              dst.device());
  const int64_t nbytes = static_cast<int64_t>(self.numel() * self.element_size());
  if (from_npu && to_npu) {
    count_named_launch("copy_", dst.device());
    count_bytes(2 * nbytes);
  } else if (to_npu) {
    count_host_to_device(nbytes, !non_blocking || !is_pinned(self.const_data_ptr()));
  } else {
    count_device_to_host(nbytes, !non_blocking || !is_pinned(dst.const_data_ptr()));
  }
  const Tensor host = on_host(dst);
  host.copy_(on_host(self));
  if (from_npu && to_npu && saturates(host.scalar_type())) saturate(host, dst.device().index());
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  count_device_to_host(static_cast<int64_t>(self.element_size()), /*blocking=*/true);
  return host_alias(self).item();
}

// ---- what torch asks about a device ------------------------------------------------------------------------------

// Yes, so that module.npu() exchanges the data of its Parameters and leaves the objects, which optimizers hold, alone.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) { return self.layout() == from.layout(); }

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool,
                         optional<double>, bool) {
  return 0;  // at::SDPBackend::math: made of operators that all exist
}

// ---- cells of recurrent networks ---------------------------------------------------------------------------------

Tensor with_bias(const Tensor& gates, const Tensor& bias) { return bias.defined() ? gates + bias : gates; }

Tensor optional_tensor(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : Tensor(); }

// i, f, o = sigmoid, g = tanh of their gates; cy = f cx + i g; hy = o tanh(cy).
void lstm_cell(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  auto args = torch::jit::pop(*stack, 5);
  const Tensor gates =
      with_bias(args[0].toTensor(), optional_tensor(args[3])) + with_bias(args[1].toTensor(), optional_tensor(args[4]));
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const Tensor cy = f * args[2].toTensor() + i * g;
  torch::jit::push(*stack, o * cy.tanh(), cy, at::cat({i, f, g, o}, 1));
}

void lstm_cell_backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  auto args = torch::jit::pop(*stack, 6);
  const Tensor grad_hy = optional_tensor(args[0]), grad_cy = optional_tensor(args[1]);
  const Tensor cx = args[2].toTensor(), cy = args[3].toTensor();
  if (!grad_hy.defined() && !grad_cy.defined()) {
    torch::jit::push(*stack, Tensor(), Tensor(), Tensor());
    return;
  }
  const auto parts = args[4].toTensor().chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_c = grad_cy.defined() ? grad_cy : at::zeros_like(cy);
  Tensor grad_o = at::zeros_like(o);
  if (grad_hy.defined()) {
    grad_c = grad_c + grad_hy * o * (1 - tanh_cy * tanh_cy);
    grad_o = grad_hy * tanh_cy;
  }
  const Tensor grad_gates =
      at::cat({grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_o * o * (1 - o)}, 1);
  torch::jit::push(*stack, grad_gates, grad_c * f, args[5].toBool() ? grad_gates.sum(0) : Tensor());
}

// r, z = sigmoid; n = tanh(input_n + r hidden_n); hy = n + z (hx - n). The gates come in the order r, z, n.
void gru_cell(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  auto args = torch::jit::pop(*stack, 5);
  const auto input = with_bias(args[0].toTensor(), optional_tensor(args[3])).chunk(3, 1);
  const auto hidden = with_bias(args[1].toTensor(), optional_tensor(args[4])).chunk(3, 1);
  const Tensor hx = args[2].toTensor();
  const Tensor r = (input[0] + hidden[0]).sigmoid(), z = (input[1] + hidden[1]).sigmoid();
  const Tensor n = (input[2] + r * hidden[2]).tanh();
  torch::jit::push(*stack, n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1));
}

void gru_cell_backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack* stack) {
  auto args = torch::jit::pop(*stack, 3);
  const Tensor grad = args[0].toTensor();
  const auto parts = args[1].toTensor().chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hidden_n = parts[4];
  const Tensor grad_z = grad * (hx - n) * z * (1 - z);
  const Tensor grad_n = grad * (1 - z) * (1 - n * n);
  const Tensor grad_r = grad_n * hidden_n * r * (1 - r);
  const Tensor input = at::cat({grad_r, grad_z, grad_n}, 1), hidden = at::cat({grad_r, grad_z, grad_n * r}, 1);
  const bool has_bias = args[2].toBool();
  torch::jit::push(*stack, input, hidden, grad * z, has_bias ? input.sum(0) : Tensor(),
                   has_bias ? hidden.sum(0) : Tensor());
}

template <HostKernel kernel>
void on_host_tensors(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_on_host(op, stack, c10::DispatchKey::CPU, kernel);
}

}  // namespace

void register_operators() {
  using torch::CppFunction;
  // Never destroyed: tensors may be used while the process ends.
  auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  m->impl("empty.memory_format", &empty);
  m->impl("empty_strided", &empty_strided);
  m->impl("resize_", &resize_);
  m->impl("set_", &set_empty_);
  m->impl("set_.source_Storage", &set_whole_storage_);
  m->impl("set_.source_Storage_storage_offset", &set_storage_);
  m->impl("set_.source_Tensor", &set_tensor_);
  m->impl("record_stream", &record_stream);
  m->impl("_copy_from", &copy_from);
  m->impl("_copy_from_and_resize", &copy_from_and_resize);
  m->impl("_local_scalar_dense", &local_scalar_dense);
  m->impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m->impl("_fused_sdp_choice", &fused_sdp_choice);

  m->impl("as_strided", &at::native::as_strided_tensorimpl);
  m->impl("view", &at::native::view);
  m->impl("_reshape_alias", &at::native::_reshape_alias);
  m->impl("unfold", &at::native::unfold);

  // A lazy conjugate is made real by copying it, which must not ask for the same again.
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto* lazy = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    lazy->impl("_copy_from", CppFunction::makeFallthrough());
  }

  m->impl("_thnn_fused_lstm_cell", CppFunction::makeFromBoxedFunction<&on_host_tensors<&lstm_cell>>());
  m->impl("_thnn_fused_lstm_cell_backward_impl",
          CppFunction::makeFromBoxedFunction<&on_host_tensors<&lstm_cell_backward>>());
  m->impl("_thnn_fused_gru_cell", CppFunction::makeFromBoxedFunction<&on_host_tensors<&gru_cell>>());
  m->impl("_thnn_fused_gru_cell_backward", CppFunction::makeFromBoxedFunction<&on_host_tensors<&gru_cell_backward>>());

  // Composites that a device with the kernel would not take apart, or that refuse devices they do not know.
  for (const char* name :
       {"convolution", "convolution_backward", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_group_norm_backward", "embedding", "embedding_dense_backward"}) {
    m->impl(name, CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace npu_simulator
