// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/zero_grads.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstring>

#include "fused_optim/pieces.h"

namespace apex_npu {
namespace {

bool is_plain(const at::Tensor& t) {
  // Subclasses may keep their values in inner tensors (DTensor), and lazy tensors elsewhere. Inference tensors must not
  // be written here; torch raises the error for them. A gradient with a graph has to be detached first.
  return t.layout() == c10::kStrided && t.device().is_cpu() && t.has_storage() && !t.is_inference() &&
         !t.requires_grad() && !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_neg() && !t.is_conj() &&
         !t._is_zerotensor() && t.is_non_overlapping_and_dense();
}

// Returns whether one of n bytes is not 0.
struct HasBits {
  APEX_NPU_INLINE bool operator()(const uint8_t* bytes, int64_t n) const {
    uint8_t bits = 0;
#pragma omp simd reduction(| : bits)
    for (int64_t i = 0; i < n; ++i) bits |= bytes[i];
    return bits != 0;
  }
};

}  // namespace

std::vector<int64_t> zero_grads_cpu(const Borrowed& tensors) {
  std::vector<int64_t> others;
  std::vector<char*> data;  // obtained by one thread, because a write may first copy the memory
  data.reserve(tensors.size());
  Pieces pieces;  // of bytes
  look_at_grads(tensors, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    if (!is_plain(grad)) {
      others.push_back(static_cast<int64_t>(i));
      return;
    }
    pieces.add_segment(static_cast<int64_t>(data.size()), 0, static_cast<int64_t>(grad.nbytes()));
    data.push_back(static_cast<char*>(grad.mutable_data_ptr()));
    grad.unsafeGetTensorImpl()->bump_version();
  });
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    std::memset(data[piece.segment] + piece.begin, 0, piece.numel);
  });
  return others;
}

bool are_zero_grads_cpu(const Borrowed& tensors) {
  std::vector<const uint8_t*> data;
  Pieces pieces;  // of bytes
  bool are_plain = true;
  look_at_grads(tensors, [&](const at::Tensor& grad, size_t) {
    if (!grad.defined() || !are_plain) return;
    are_plain = is_plain(grad);
    if (!are_plain) return;
    pieces.add_segment(static_cast<int64_t>(data.size()), 0, static_cast<int64_t>(grad.nbytes()));
    data.push_back(static_cast<const uint8_t*>(grad.const_data_ptr()));
  });
  if (!are_plain) return false;
  std::atomic<bool> found{false};
  pieces.parallel_for_each([&](size_t i) {
    if (found.load(std::memory_order_relaxed)) return;
    const Piece& piece = pieces[i];
    if (vectorized(HasBits(), data[piece.segment] + piece.begin, piece.numel)) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  return !found;
}

}  // namespace apex_npu
