// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reads many tensors in sequence, with prefetching.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <vector>

#include "prefetch.h"

namespace apex_npu {

// Tensors that the caller keeps alive. Every step reads thousands of them, and reference counting would take longer.
using Borrowed = std::vector<const at::Tensor*>;

// Calls look(i) for each tensor. A tensor's objects are scattered over memory, and an update has evicted them from the
// caches, so each call would wait for memory several times. This function therefore prefetches `bytes` of a tensor's
// implementation, and a few tensors ahead `next(implementation)` prefetches the objects that it points to. Each cache
// line costs time, so unneeded ones are not prefetched.
constexpr size_t kAhead = 8;

// References, storage, autograd's data, version counter and Python object come first, sizes and dtype last.
constexpr size_t kPointersBytes = 64;

inline void prefetch_impl(const at::Tensor& tensor, size_t bytes = sizeof(c10::TensorImpl)) {
  prefetch_bytes(tensor.unsafeGetTensorImpl(), bytes);
}

template <typename Next, typename Look>
void look_at_each(const Borrowed& tensors, const Next& next, const Look& look, size_t bytes = sizeof(c10::TensorImpl)) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + 2 * kAhead < tensors.size()) prefetch_impl(*tensors[i + 2 * kAhead], bytes);
    if (i + kAhead < tensors.size()) next(*tensors[i + kAhead]->unsafeGetTensorImpl());
    look(i);
  }
}

inline void prefetch_storage(const c10::TensorImpl& impl) {
  if (impl.has_storage()) APEX_NPU_PREFETCH(impl.unsafe_storage().unsafeGetStorageImpl());
}

// A VariableVersion points only to its counter.
inline void prefetch_counter(const c10::TensorImpl& impl) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "its counter is prefetched");
  const void* counter = nullptr;
  std::memcpy(&counter, &impl.version_counter(), sizeof(counter));
  APEX_NPU_PREFETCH(counter);
}

// The gradient follows the name of the tensor.
inline void prefetch_autograd(const c10::TensorImpl& impl) { prefetch_bytes(impl.autograd_meta(), kPointersBytes); }

// Tensor::grad() also checks whether the tensor is a leaf, which takes longer than everything else.
inline const at::Tensor& grad_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->grad();
}

// Calls look(grad, i) for the gradient of each tensor, which may be undefined, with the prefetching of look_at_each.
// `next` prefetches objects that the gradients point to, and `bytes` of the gradients are prefetched before.
template <typename Next, typename Look>
void look_at_grads(const Borrowed& tensors, const Next& next, const Look& look, size_t bytes) {
  const auto look_and_prefetch = [&](size_t i) {
    if (i + kAhead / 2 < tensors.size()) prefetch_impl(grad_of(*tensors[i + kAhead / 2]), bytes);
    if (i + kAhead / 4 < tensors.size()) next(*grad_of(*tensors[i + kAhead / 4]).unsafeGetTensorImpl());
    look(grad_of(*tensors[i]), i);
  };
  look_at_each(tensors, prefetch_autograd, look_and_prefetch, kPointersBytes);
}

template <typename Look>
void look_at_grads(const Borrowed& tensors, const Look& look, size_t bytes = sizeof(c10::TensorImpl)) {
  look_at_grads(tensors, prefetch_storage, look, bytes);
}

// Increments the version counter, as an in-place operation does. Inference tensors have no counter and are skipped, as
// in torch's own function.
inline void increment_version(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) impl->bump_version();
}
void increment_versions(const Borrowed& tensors);

// Returns whether one of them has a gradient.
bool any_grads(const Borrowed& tensors);

// Returns the indices of the float16 and bfloat16 tensors.
std::vector<int64_t> low_precision_of(const Borrowed& tensors);

// Sets tensor.grad = None for each tensor.
void drop_grads(const Borrowed& tensors);

// Sets tensors[i].grad = grads[i] for each tensor.
void set_grads(const Borrowed& tensors, const Borrowed& grads);

}  // namespace apex_npu
