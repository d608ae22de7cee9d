// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many tensors, read one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <vector>

#include "prefetch.h"

namespace apex_npu {

// Tensors that the caller keeps alive. Every step reads thousands of them: reference counting would take longer.
using Borrowed = std::vector<const at::Tensor*>;

// look(i) for each tensor. A tensor's objects are scattered over memory, and an update has evicted them from the
// caches: each call would wait for memory a few times, in sequence. So `next`, which gets the tensor's implementation,
// prefetches what it points to a few tensors ahead, and of the implementation itself `bytes` are prefetched before
// that. Each line of the cache costs, the unneeded ones, too.
constexpr size_t kAhead = 8;

// References, storage, autograd's data, version counter and object in Python come first, sizes and dtype last.
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

// The counter is all that a VariableVersion points to.
inline void prefetch_counter(const c10::TensorImpl& impl) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "its counter is prefetched");
  const void* counter = nullptr;
  std::memcpy(&counter, &impl.version_counter(), sizeof(counter));
  APEX_NPU_PREFETCH(counter);
}

// Its gradient follows a name.
inline void prefetch_autograd(const c10::TensorImpl& impl) { prefetch_bytes(impl.autograd_meta(), kPointersBytes); }

// Tensor::grad() also asks whether it is a leaf, which takes longer than all else.
inline const at::Tensor& grad_of(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->grad();
}

// look(grad, i) for the gradient of each tensor, undefined where it has none, likewise; `next` prefetches what the
// gradients point to, of which themselves `bytes` are.
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

// What in-place operations on these tensors would have done to their version counters. Those of inference have none;
// torch's own function passes over them, too.
inline void increment_version(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) impl->bump_version();
}
void increment_versions(const Borrowed& tensors);

// Whether one of them has a gradient.
bool any_grads(const Borrowed& tensors);

// The indices of those in float16 or bfloat16.
std::vector<int64_t> low_precision_of(const Borrowed& tensors);

// tensor.grad = None, for each.
void drop_grads(const Borrowed& tensors);

// tensors[i].grad = grads[i], for each.
void set_grads(const Borrowed& tensors, const Borrowed& grads);

}  // namespace apex_npu
