// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/grad_slots.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "combine_tensors/python_objects.h"
#include "fused_optim/gather_cpu.h"
#include "fused_optim/grad_list.h"

namespace apex_npu {
namespace {

bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Returns whether two of `grads` overlap. Each of them fills its memory.
bool overlap(const Borrowed& grads) {
  std::vector<std::pair<const char*, const char*>> ranges;
  ranges.reserve(grads.size());
  for (const at::Tensor* grad : grads) {
    const char* begin = static_cast<const char*>(grad->storage().data()) + grad->storage_offset() * grad->itemsize();
    if (grad->numel() > 0) ranges.emplace_back(begin, begin + grad->nbytes());
  }
  std::sort(ranges.begin(), ranges.end());
  const auto overlaps_next = [](const auto& range, const auto& next) { return next.first < range.second; };
  return std::adjacent_find(ranges.begin(), ranges.end(), overlaps_next) != ranges.end();
}

}  // namespace

GradSlots::GradSlots(const std::vector<at::Tensor>& shapes, std::vector<int64_t> offsets,
                     std::optional<c10::Device> device)
    : device_(device) {
  TORCH_CHECK_VALUE(shapes.size() == offsets.size(), "GradSlots: expected one offset per shape (", shapes.size(),
                    "), got ", offsets.size());
  slots_.reserve(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor& shape = shapes[i];
    slots_.push_back({offsets[i], shape.numel(), c10::DimVector(shape.sizes()), c10::DimVector(shape.strides()),
                      shape.scalar_type()});
  }
}

bool GradSlots::has_order(const at::Tensor& grad, const Slot& slot) {
  // Subclasses may have only the memory of inner tensors (DTensor). The memory of lazy tensors has other values.
  if (grad.layout() != c10::kStrided || !grad.has_storage()) return false;
  if (grad.unsafeGetTensorImpl()->is_python_dispatch() || grad.is_neg() || grad._is_zerotensor()) return false;
  if (grad.sizes() != at::IntArrayRef(slot.sizes)) return false;
  for (size_t d = 0; d < slot.sizes.size(); ++d) {
    if (slot.sizes[d] != 1 && grad.stride(static_cast<int64_t>(d)) != slot.strides[d]) return false;
  }
  return true;
}

bool GradSlots::may_be_of(at::ScalarType dtype, const Slot& slot) {
  return dtype == slot.dtype || (slot.dtype == at::kFloat && is_narrow(dtype));
}

bool GradSlots::is_readable(const at::Tensor& grad, const Slot& slot) const {
  return may_be_of(grad.scalar_type(), slot) && grad.device() == device_ && has_order(grad, slot);
}

void GradSlots::remember_views(const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(views.size() == slots_.size(), "remember_views: expected ", slots_.size(), " views, got ",
                    views.size());
  places_.emplace(views);
}

GradStates GradSlots::states(const Borrowed& params, const Borrowed& views, size_t first, InPlace in_place,
                             int64_t least_numel, bool share_memory) const {
  TORCH_CHECK_VALUE(params.size() == views.size() && first + params.size() <= slots_.size(),
                    "states: expected one view per parameter, and a slot for each, got ", views.size(), " views of ",
                    params.size(), " parameters from slot ", first, " on, of ", slots_.size());
  GradStates found{std::string(params.size(), static_cast<char>(GradState::NONE)), {}};
  Borrowed sharing;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Slot& slot = slots_[first + i];
    if (grad.is_same(*views[i]) && (!places_.has_value() || places_->is_intact(first + i, grad))) {
      found.states[i] = static_cast<char>(GradState::IN_BUFFER);
      return;
    }
    found.states[i] = static_cast<char>(GradState::ELSEWHERE);
    bool stays = slot.numel >= least_numel && can_stay(grad, first + i, in_place);
    if (stays && in_place == InPlace::WRITE) {
      if (share_memory) sharing.push_back(&grad);
      stays = share_memory || (allocated_by_torch(grad) && is_alone(grad));
    }
    if (!stays) found.to_gather.push_back(static_cast<int64_t>(first + i));
  });
  if (overlap(sharing)) {
    found.to_gather.clear();
    for (size_t i = 0; i < params.size(); ++i) {
      if (found.states[i] == static_cast<char>(GradState::ELSEWHERE))
        found.to_gather.push_back(static_cast<int64_t>(first + i));
    }
  }
  return found;
}

bool GradSlots::unscale(const Borrowed& params, const Borrowed& views, double factor,
                        const std::optional<at::Tensor>& found_inf, int64_t least_numel) const {
  TORCH_CHECK_VALUE(params.size() == slots_.size() && views.size() == slots_.size(), "unscale: expected ",
                    slots_.size(), " parameters and views, got ", params.size(), " and ", views.size());
  if (!places_.has_value()) return false;
  std::vector<size_t> taken, written;
  bool fits = true;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!fits || !grad.defined()) return;
    if (grad.is_same(*views[i])) {
      fits = places_->is_intact(i, grad);
      written.push_back(i);
    } else if (slots_[i].numel >= least_numel && can_stay(grad, i, InPlace::WRITE) && allocated_by_torch(grad) &&
               is_alone(grad)) {
      written.push_back(i);
    } else {
      fits = can_stay(grad, i, InPlace::READ) && places_->is_intact(i, *views[i]) && is_unused(*views[i]);
      taken.push_back(i);
    }
  });
  if (!fits) return false;
  std::vector<at::Tensor> grads;  // held: freeing a gradient may run Python code that releases the tensors that follow
  Borrowed from, to;
  grads.reserve(taken.size());
  for (size_t i : taken) grads.push_back(params[i]->grad());
  for (size_t k = 0; k < taken.size(); ++k) {
    from.push_back(&grads[k]);
    to.push_back(views[taken[k]]);
  }
  for (size_t i : written) {
    from.push_back(&params[i]->grad());
    to.push_back(&params[i]->grad());
  }
  gather_cpu(to, from, factor, found_inf, false);
  for (size_t i : taken) params[i]->mutable_grad() = *views[i];
  for (size_t i : written) {
    const at::Tensor& grad = params[i]->grad();
    if (!grad.is_inference()) grad.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

GradAddresses GradSlots::addresses(const Borrowed& params, const Borrowed& views, size_t first,
                                   const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat,
                                   const at::Tensor& addresses) const {
  const size_t count = params.size();
  TORCH_CHECK_VALUE(views.size() == count && first + count <= slots_.size(),
                    "addresses: expected one view per parameter, and a slot for each, got ", views.size(), " of ",
                    count, " from slot ", first, " on, of ", slots_.size());
  TORCH_CHECK_VALUE(addresses.is_cpu() && addresses.is_contiguous() &&
                        addresses.numel() == static_cast<int64_t>(slots_.size()) && places_.has_value(),
                    "addresses: expected room for ", slots_.size(), " numbers, and views, got ", addresses.numel());
  GradAddresses found{std::string(count, static_cast<char>(GradState::NONE)), {}, std::nullopt, true};
  int64_t* const out = addresses.mutable_data_ptr<int64_t>();
  std::fill_n(out, slots_.size(), 0);
  std::vector<char> is_chosen;
  if (chosen.has_value()) is_chosen.resize(slots_.size());
  for (int64_t slot : chosen.value_or(std::vector<int64_t>())) is_chosen.at(static_cast<size_t>(slot)) = true;
  const auto begin = reinterpret_cast<intptr_t>(flat.const_data_ptr());
  const auto end = begin + static_cast<intptr_t>(flat.nbytes());
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    const size_t slot = first + i;
    if (i + 2 * kAhead < count) prefetch_impl(*views[i + 2 * kAhead]);
    if (i + kAhead < count) prefetch_storage(*views[i + kAhead]->unsafeGetTensorImpl());
    if (!grad.defined() || (chosen.has_value() && !is_chosen[slot])) return;
    const at::Tensor& view = *views[i];
    const bool intact = places_->is_intact(slot, view);
    if (grad.is_same(view) && intact) {
      found.states[i] = static_cast<char>(GradState::IN_BUFFER);
      return;
    }
    found.states[i] = static_cast<char>(GradState::ELSEWHERE);
    if (!intact || !is_unused(view)) found.views_are_free = false;
    const at::ScalarType dtype = grad.scalar_type();
    if (may_be_of(dtype, slots_[slot]) && dtype == found.dtype.value_or(dtype) && grad.device() == view.device() &&
        has_order(grad, slots_[slot])) {
      const auto size = static_cast<int64_t>(grad.itemsize());
      // Not data_ptr(), which would copy copy-on-write memory.
      const auto address = reinterpret_cast<intptr_t>(grad.storage().data()) + grad.storage_offset() * size;
      if (address < begin || address >= end) {  // another gradient's slot may be written before it is read
        out[slot] = address - slots_[slot].offset * size;
        found.dtype = dtype;
      }
    }
    if (out[slot] == 0) found.others.push_back(static_cast<int64_t>(slot));
  });
  return found;
}

bool GradSlots::can_stay(const at::Tensor& grad, size_t i, InPlace in_place) const {
  const Slot& slot = slots_[i];
  // Slots, of another gradient or a parameter, may be written before they are read.
  if (in_place == InPlace::NO || !is_readable(grad, slot) || is_slot(grad)) return false;
  if (in_place != InPlace::WRITE) return true;
  // Copy-on-write memory gets another address when it is written. Only CPU kernels handle this.
  if (!grad.device().is_cpu() && c10::impl::cow::is_cow_data_ptr(grad.storage().data_ptr())) return false;
  return grad.scalar_type() == slot.dtype && !grad.requires_grad();
}

at::Tensor GradSlots::grad_list(const Borrowed& params, size_t first, int64_t numel, bool writable) {
  TORCH_CHECK_VALUE(!params.empty() && first + params.size() <= slots_.size(), "grad_list: expected parameters of the ",
                    slots_.size(), " slots, got ", params.size(), " from slot ", first, " on");
  GradList grads(numel, params.size(), writable, device_.value_or(c10::kCPU));
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Slot& slot = slots_[first + i];
    TORCH_CHECK_VALUE(is_readable(grad, slot), "grad_list: the gradient of parameter ", first + i, ", ",
                      grad.toString(), " of shape ", grad.sizes(), " with strides ", grad.strides(),
                      ", cannot be read where it is");
    grads.add(grad, slot.offset - slots_[first].offset);
  });
  return as_operand(std::move(grads), numel, slots_[first].dtype);
}

std::optional<std::vector<at::Tensor>> GradSlots::take_up(const Borrowed& params, const at::Tensor& flat) {
  TORCH_CHECK_VALUE(params.size() == slots_.size() && places_.has_value(),
                    "take_up: expected one parameter for each of ", slots_.size(), " slots, and views, got ",
                    params.size());
  const std::optional<LentMemory> lent = std::exchange(lent_, std::nullopt);
  if (!lent.has_value() || lent->count() == 0) return std::nullopt;
  std::vector<at::Tensor> views(params.size());
  int64_t count = 0;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined() || !lent->has(grad) || grad.requires_grad() || !places_->is_intact(i, grad)) return;
    views[i] = grad;
    ++count;
  });
  if (lent->count() != count || !lent->give_back(flat)) return std::nullopt;
  for (size_t i = 0; i < views.size(); ++i) {
    if (!views[i].defined()) views[i] = storage_view(flat, slots_[i].offset, slots_[i].sizes, slots_[i].strides);
  }
  return views;
}

}  // namespace apex_npu
