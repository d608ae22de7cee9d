// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many tensors, read one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "prefetch.h"

namespace apex_npu {

// Tensors that the caller keeps alive. Every step reads thousands of them: reference counting would take longer.
using Borrowed = std::vector<const at::Tensor*>;

// look(i) for each tensor. A tensor's objects are scattered over memory, and an update has evicted them from the
// caches: each call would wait for memory a few times, in sequence. So `next`, which gets the tensor's implementation,
// prefetches what it points to a few tensors ahead, and the implementation itself is prefetched before that.
constexpr size_t kAhead = 8;

inline void prefetch_impl(const at::Tensor& tensor) {
  prefetch_bytes(tensor.unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
}

template <typename Next, typename Look>
void look_at_each(const Borrowed& tensors, const Next& next, const Look& look) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + 2 * kAhead < tensors.size()) prefetch_impl(*tensors[i + 2 * kAhead]);
    if (i + kAhead < tensors.size()) next(*tensors[i + kAhead]->unsafeGetTensorImpl());
    look(i);
  }
}

inline void prefetch_storage(const c10::TensorImpl& impl) {
  if (impl.has_storage()) APEX_NPU_PREFETCH(impl.unsafe_storage().unsafeGetStorageImpl());
}

inline void prefetch_autograd(const c10::TensorImpl& impl) { APEX_NPU_PREFETCH(impl.autograd_meta()); }

// look(grad, i) for the gradient of each tensor, undefined where it has none, likewise.
template <typename Look>
void look_at_grads(const Borrowed& tensors, const Look& look) {
  look_at_each(tensors, prefetch_autograd, [&](size_t i) {
    if (i + kAhead / 2 < tensors.size()) prefetch_impl(tensors[i + kAhead / 2]->grad());
    look(tensors[i]->grad(), i);
  });
}

// What in-place operations on these tensors would have done to their version counters.
void increment_versions(const Borrowed& tensors);

// The indices of those in float16 or bfloat16.
std::vector<int64_t> low_precision_of(const Borrowed& tensors);

// tensor.grad = None, for each.
void drop_grads(const Borrowed& tensors);

}  // namespace apex_npu
