// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/borrowed.h"

#include <utility>

namespace apex_npu {

void increment_versions(const Borrowed& tensors) {
  look_at_each(tensors, prefetch_counter, [&](size_t i) { increment_version(*tensors[i]); }, kPointersBytes);
}

bool any_grads(const Borrowed& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + 2 * kAhead < tensors.size()) prefetch_impl(*tensors[i + 2 * kAhead], kPointersBytes);
    if (i + kAhead < tensors.size()) prefetch_autograd(*tensors[i + kAhead]->unsafeGetTensorImpl());
    if (grad_of(*tensors[i]).defined()) return true;
  }
  return false;
}

std::vector<int64_t> low_precision_of(const Borrowed& tensors) {
  std::vector<int64_t> indices;
  const auto nothing = [](const c10::TensorImpl&) {};
  look_at_each(tensors, nothing, [&](size_t i) {
    const at::ScalarType dtype = tensors[i]->scalar_type();
    if (dtype == at::kHalf || dtype == at::kBFloat16) indices.push_back(static_cast<int64_t>(i));
  });
  return indices;
}

void drop_grads(const Borrowed& tensors) {
  // Freed together at the end: freeing a gradient may run Python code that releases the tensors that follow.
  std::vector<at::Tensor> dropped;
  dropped.reserve(tensors.size());
  const auto drop = [&](const at::Tensor& grad, size_t i) {
    if (grad.defined()) dropped.push_back(std::move(tensors[i]->mutable_grad()));
  };
  look_at_grads(tensors, drop, kPointersBytes);
}

void set_grads(const Borrowed& tensors, const Borrowed& grads) {
  TORCH_CHECK_VALUE(tensors.size() == grads.size(), "set_grads: expected one gradient per tensor, got ", grads.size(),
                    " and ", tensors.size());
  std::vector<at::Tensor> replaced;  // as in drop_grads
  replaced.reserve(tensors.size());
  const auto set = [&](const at::Tensor&, size_t i) {
    replaced.push_back(std::exchange(tensors[i]->mutable_grad(), *grads[i]));
  };
  look_at_grads(tensors, set, kPointersBytes);
}

}  // namespace apex_npu
