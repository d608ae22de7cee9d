// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/gather_cpu.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/pieces.h"
#include "fused_optim/unscale.h"

namespace apex_npu {
namespace {

bool supported(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  // Subclasses may have only the memory of inner tensors (DTensor).
  return t.layout() == c10::kStrided && t.device().is_cpu() && !t.unsafeGetTensorImpl()->is_python_dispatch() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

void check(const Borrowed& slots, const Borrowed& grads) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "gather: expected one gradient per slot (", slots.size(), "), got ",
                    grads.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor &slot = *slots[i], &grad = *grads[i];
    TORCH_CHECK_TYPE(supported(slot) && supported(grad),
                     "gather: slots and gradients must be dense float16, bfloat16, float32 or float64 tensors on the "
                     "cpu, with memory of their own, got ",
                     slot.toString(), " and ", grad.toString(), " at index ", i);
    TORCH_CHECK_VALUE(slot.sizes() == grad.sizes(), "gather: gradient ", i, " has shape ", grad.sizes(), ", its slot ",
                      slot.sizes());
    TORCH_CHECK_VALUE(slot.is_non_overlapping_and_dense(), "gather: slot ", i, " must fill its memory");
  }
}

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

void gather_cpu(const Borrowed& slots, const Borrowed& grads, double inv_scale,
                const std::optional<at::Tensor>& found_inf, bool adds) {
  check(slots, grads);
  for (size_t i = 0; adds && i < slots.size(); ++i) {
    TORCH_CHECK_TYPE(slots[i]->scalar_type() == at::kFloat, "gather: gradients are added to float32, got ",
                     slots[i]->toString(), " at index ", i);
  }
  Pieces pieces;
  std::vector<at::Tensor> copies;
  std::vector<Place> to, from;  // obtained by one thread, because copy-on-write memory is copied at this point
  to.reserve(slots.size());
  from.reserve(slots.size());
  look_at_each(grads, prefetch_storage, [&](size_t i) {
    if (i + kAhead < slots.size()) prefetch_storage(*slots[i + kAhead]->unsafeGetTensorImpl());
    const at::Tensor &slot = *slots[i], &grad = *grads[i];
    const bool is_lazy = grad.is_neg() || grad._is_zerotensor();  // its memory does not have its values
    const bool copied = is_lazy || slot.strides() != grad.strides();
    if (copied && adds) copies.push_back(at::empty_like(slot));
    const at::Tensor& read = !copied ? grad : adds ? copies.back() : slot;
    // In the slot's order of elements. Resolved first, because copy_ ignores the sign of lazily negated float16.
    if (copied) read.copy_(grad.resolve_neg());
    to.emplace_back(slot, slot.mutable_data_ptr());
    from.emplace_back(read, read.const_data_ptr());
    pieces.add_segment(static_cast<int64_t>(i), 0, slot.numel());
  });
  std::atomic<bool> bad{false};
  pieces.parallel_for_each([&](size_t i) {
    if (i + 1 < pieces.size()) {
      const Piece& next = pieces[i + 1];
      from[next.segment].from(next.begin).prefetch(next.numel);
    }
    const Piece& piece = pieces[i];
    const Place slot = to[piece.segment].from(piece.begin), grad = from[piece.segment].from(piece.begin);
    const auto pass = adds ? accumulate : unscale;
    if (pass(slot, grad, inv_scale, piece.numel)) bad.store(true, std::memory_order_relaxed);
  });
  if (bad && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
}

std::optional<size_t> take_grads_cpu(const Borrowed& params, const Borrowed& slots, double inv_scale,
                                     const std::optional<at::Tensor>& found_inf) {
  TORCH_CHECK_VALUE(params.size() == slots.size(), "take_grads: params and slots must have one length");
  Borrowed present;
  std::vector<at::Tensor> grads;  // held: freeing a gradient may run Python code that releases those that follow
  std::vector<size_t> indices;
  present.reserve(params.size());
  grads.reserve(params.size());
  indices.reserve(params.size());
  std::optional<size_t> unfit;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (i + 2 * kAhead < slots.size()) prefetch_impl(*slots[i + 2 * kAhead]);
    if (!grad.defined() || unfit.has_value()) return;
    const bool narrow = slots[i]->scalar_type() == at::kFloat && grad.scalar_type() != at::kDouble;
    if (!supported(grad) || (!narrow && grad.scalar_type() != slots[i]->scalar_type())) {
      unfit = i;
      return;
    }
    present.push_back(slots[i]);
    // It may be in another gradient's slot, which is about to be written. With another dtype it is in another buffer.
    const bool same_buffer = grad.scalar_type() == slots[i]->scalar_type() && is_slot(grad);
    grads.push_back(same_buffer ? grad.clone() : grad);
    indices.push_back(i);
  });
  if (unfit.has_value()) return unfit;
  Borrowed borrowed(grads.size());
  std::transform(grads.begin(), grads.end(), borrowed.begin(), [](const at::Tensor& grad) { return &grad; });
  gather_cpu(present, borrowed, inv_scale, found_inf, false);
  for (size_t i : indices) params[i]->mutable_grad() = *slots[i];
  return std::nullopt;
}

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
