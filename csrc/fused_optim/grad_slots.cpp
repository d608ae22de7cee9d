// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/grad_slots.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <utility>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/placed_grads.h"

namespace apex_npu {
namespace {

bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// The same values, in memory that is copied as soon as one of the two is written: by a backward of another loss through
// the same model, for one, or by model.zero_grad(). Undefined where the memory is not torch's own.
at::Tensor lazy_copy(const at::Tensor& t) {
  c10::intrusive_ptr<c10::StorageImpl> storage =
      c10::impl::cow::lazy_clone_storage(*t.storage().unsafeGetStorageImpl());
  if (!storage) return {};
  at::Tensor copy = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), t.key_set(), t.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return copy;
}

}  // namespace

GradSlots::GradSlots(const std::vector<at::Tensor>& shapes, std::vector<int64_t> offsets) {
  TORCH_CHECK_VALUE(shapes.size() == offsets.size(), "GradSlots: expected one offset per shape (", shapes.size(),
                    "), got ", offsets.size());
  slots_.reserve(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor& shape = shapes[i];
    slots_.push_back({offsets[i], shape.numel(), c10::DimVector(shape.sizes()), c10::DimVector(shape.strides()),
                      shape.scalar_type()});
  }
}

bool GradSlots::is_readable(const at::Tensor& grad, const Slot& slot) {
  const at::ScalarType dtype = grad.scalar_type();
  if (dtype != slot.dtype && !(slot.dtype == at::kFloat && is_narrow(dtype))) return false;
  // Subclasses may have no memory but that of tensors inside (DTensor), lazy ones other values in it.
  if (grad.layout() != c10::kStrided || !grad.device().is_cpu() || !grad.has_storage()) return false;
  if (grad.unsafeGetTensorImpl()->is_python_dispatch() || grad.is_neg() || grad._is_zerotensor()) return false;
  if (grad.sizes() != at::IntArrayRef(slot.sizes)) return false;
  for (size_t d = 0; d < slot.sizes.size(); ++d) {
    if (slot.sizes[d] != 1 && grad.stride(static_cast<int64_t>(d)) != slot.strides[d]) return false;
  }
  return true;
}

bool GradSlots::was_stepped(const at::Tensor& grad, size_t slot) const {
  return !stepped_.empty() && stepped_[slot]._unsafe_get_target() == grad.storage().unsafeGetStorageImpl();
}

void GradSlots::remember_views(const std::vector<at::Tensor>& views) {
  TORCH_CHECK_VALUE(views.size() == slots_.size(), "remember_views: expected ", slots_.size(), " views, got ",
                    views.size());
  places_.emplace(views);
}

std::string GradSlots::states(const Borrowed& params, const Borrowed& views, size_t first, LooseFor loose_for,
                              int64_t loose_numel, IsAlone is_alone) const {
  TORCH_CHECK_VALUE(params.size() == views.size() && first + params.size() <= slots_.size(),
                    "states: expected one view per parameter, and a slot for each, got ", views.size(), " views of ",
                    params.size(), " parameters from slot ", first, " on, of ", slots_.size());
  std::string states(params.size(), static_cast<char>(GradState::kAbsent));
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Slot& slot = slots_[first + i];
    GradState state = GradState::kForeign;
    if (grad.is_same(*views[i]) && (!places_.has_value() || places_->is_intact(first + i, grad))) {
      state = GradState::kPresent;
    } else if (slot.numel >= loose_numel && is_loose(grad, first + i, loose_for, is_alone)) {
      state = GradState::kLoose;
    }
    states[i] = static_cast<char>(state);
  });
  return states;
}

bool GradSlots::is_loose(const at::Tensor& grad, size_t i, LooseFor loose_for, IsAlone is_alone) const {
  // Slots, of another gradient or a parameter, may be written before they are read.
  if (loose_for == LooseFor::kNothing || !is_readable(grad, slots_[i]) || is_slot(grad)) return false;
  if (loose_for == LooseFor::kStepping) return !was_stepped(grad, i);
  if (loose_for == LooseFor::kReading) return true;
  if (grad.scalar_type() != slots_[i].dtype || grad.requires_grad()) return false;
  return loose_for == LooseFor::kWritingParts || (owns_memory(grad) && is_alone(grad));
}

void GradSlots::leave_out_overlapping(const Borrowed& grads, std::string& states) {
  struct Range {
    const char *begin, *end;
    size_t index;
  };
  std::vector<Range> ranges;
  ranges.reserve(grads.size());
  look_at_each(grads, prefetch_storage, [&](size_t i) {
    const at::Tensor& grad = *grads[i];
    if (states[i] != static_cast<char>(GradState::kLoose) || grad.numel() == 0) return;
    const char* begin = static_cast<const char*>(grad.storage().data()) + grad.storage_offset() * grad.itemsize();
    ranges.push_back({begin, begin + grad.nbytes(), i});
  });
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
  size_t reaching = 0;  // the one that reaches furthest so far
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[reaching].end) {
      states[ranges[i].index] = states[ranges[reaching].index] = static_cast<char>(GradState::kForeign);
    }
    if (ranges[i].end > ranges[reaching].end) reaching = i;
  }
}

at::Tensor GradSlots::place(const Borrowed& params, size_t first, int64_t numel, bool stepped) {
  TORCH_CHECK_VALUE(!params.empty() && first + params.size() <= slots_.size(), "place: expected parameters of the ",
                    slots_.size(), " slots, got ", params.size(), " from slot ", first, " on");
  if (stepped && stepped_.empty()) {
    const Remembered none(c10::intrusive_ptr<c10::StorageImpl>{});
    stepped_.resize(slots_.size(), none);
  }
  PlacedGrads placed(numel, params.size());
  const int64_t begin = slots_[first].offset;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    place_one(placed, grad, first + i, begin);
    if (stepped && !was_stepped(grad, first + i)) stepped_[first + i] = grad.storage().getWeakStorageImpl();
  });
  return as_operand(std::move(placed), numel, slots_[first].dtype);
}

at::Tensor GradSlots::place_grads(const Borrowed& grads, size_t first, int64_t numel) const {
  TORCH_CHECK_VALUE(!grads.empty() && first + grads.size() <= slots_.size(), "place_grads: expected gradients of the ",
                    slots_.size(), " slots, got ", grads.size(), " from slot ", first, " on");
  PlacedGrads placed(numel, grads.size());
  look_at_each(grads, prefetch_storage, [&](size_t i) {
    if (grads[i]->defined()) place_one(placed, *grads[i], first + i, slots_[first].offset);
  });
  return as_operand(std::move(placed), numel, slots_[first].dtype);
}

void GradSlots::place_one(PlacedGrads& placed, const at::Tensor& grad, size_t i, int64_t begin) const {
  TORCH_CHECK_VALUE(is_readable(grad, slots_[i]), "place: the gradient of parameter ", i, ", ", grad.toString(),
                    " of shape ", grad.sizes(), " with strides ", grad.strides(), ", cannot be read where it lies");
  placed.add(grad, slots_[i].offset - begin);
}

std::vector<int64_t> GradSlots::share(const Borrowed& sources, const Borrowed& params, int64_t loose_numel,
                                      IsAlone is_alone) const {
  TORCH_CHECK_VALUE(sources.size() == slots_.size() && params.size() == slots_.size(), "share: expected ",
                    slots_.size(), " sources and parameters, got ", sources.size(), " and ", params.size());
  std::vector<int64_t> others;
  look_at_grads(sources, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined() || sources[i]->is_same(*params[i])) return;
    // Other references to its memory (a bucket of DistributedDataParallel, DLPack) would not follow when it is
    // copied.
    const bool shares =
        slots_[i].numel >= loose_numel && is_readable(grad, slots_[i]) && !is_slot(grad) && is_alone(grad);
    at::Tensor twin = shares ? lazy_copy(grad) : at::Tensor();
    if (twin.defined()) {
      params[i]->mutable_grad() = std::move(twin);
    } else {
      others.push_back(static_cast<int64_t>(i));
    }
  });
  return others;
}

}  // namespace apex_npu
