// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/gather_cpu.h"

#include <ATen/ops/copy.h>

#include <atomic>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/pieces.h"
#include "fused_optim/unscale.h"

namespace apex_npu {
namespace {

bool supported(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  // Subclasses may have no memory but that of tensors inside (DTensor).
  return t.layout() == c10::kStrided && t.device().is_cpu() && !t.unsafeGetTensorImpl()->is_python_dispatch() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

void check(const std::vector<at::Tensor>& slots, const std::vector<at::Tensor>& grads) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "gather: expected one gradient per slot (", slots.size(), "), got ",
                    grads.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    TORCH_CHECK_TYPE(supported(slots[i]) && supported(grads[i]),
                     "gather: slots and gradients must be dense float16, bfloat16, float32 or float64 tensors on the "
                     "cpu, with memory of their own, got ",
                     slots[i].toString(), " and ", grads[i].toString(), " at index ", i);
    TORCH_CHECK_VALUE(slots[i].sizes() == grads[i].sizes(), "gather: gradient ", i, " has shape ", grads[i].sizes(),
                      ", its slot ", slots[i].sizes());
    TORCH_CHECK_VALUE(slots[i].is_non_overlapping_and_dense(), "gather: slot ", i, " must fill its memory");
  }
}

}  // namespace

void gather_cpu(const std::vector<at::Tensor>& slots, const std::vector<at::Tensor>& grads, double inv_scale,
                const std::optional<at::Tensor>& found_inf) {
  check(slots, grads);
  Pieces pieces;
  std::vector<bool> copied(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const bool is_lazy = grads[i].is_neg() || grads[i]._is_zerotensor();  // its memory is not what it reads as
    copied[i] = is_lazy || slots[i].strides() != grads[i].strides();
    // In the slot's order of elements. Resolved first: copy_ takes negated float16 for what it is without the sign.
    if (copied[i]) slots[i].copy_(grads[i].resolve_neg());
    pieces.add_segment(static_cast<int64_t>(i), 0, slots[i].numel());
  }
  std::atomic<bool> bad{false};
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    const at::Tensor& slot = slots[piece.segment];
    const at::Tensor& grad = copied[piece.segment] ? slot : grads[piece.segment];
    const Place to(slot, slot.mutable_data_ptr(), piece.begin), from(grad, grad.const_data_ptr(), piece.begin);
    if (unscale(to, from, inv_scale, piece.numel)) bad.store(true, std::memory_order_relaxed);
  });
  if (bad && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
}

int64_t take_grads_cpu(const Borrowed& sources, const Borrowed& params, const Borrowed& slots, double inv_scale,
                       const std::optional<at::Tensor>& found_inf) {
  TORCH_CHECK_VALUE(sources.size() == params.size() && sources.size() == slots.size(),
                    "take_grads: sources, params and slots must have one length");
  std::vector<at::Tensor> present, grads;
  std::vector<size_t> indices;
  int64_t unfit = -1;
  look_at_each(sources, prefetch_autograd, [&](size_t i) {
    const at::Tensor& grad = sources[i]->grad();
    if (!grad.defined() || unfit >= 0) return;
    const bool own = sources[i]->is_same(*params[i]);
    const bool narrow = slots[i]->scalar_type() == at::kFloat && grad.scalar_type() != at::kDouble;
    if (!supported(grad) || (own && !narrow && grad.scalar_type() != slots[i]->scalar_type())) {
      unfit = static_cast<int64_t>(i);
      return;
    }
    present.push_back(*slots[i]);
    // It may lie in another's slot, which is about to be written.
    grads.push_back(own && is_slot(grad) ? grad.clone() : grad);
    indices.push_back(i);
  });
  if (unfit >= 0) return unfit;
  gather_cpu(present, grads, inv_scale, found_inf);
  for (size_t i : indices) params[i]->mutable_grad() = *slots[i];
  return -1;
}

}  // namespace apex_npu
