// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/grad_slots.h"

#include <c10/core/impl/COW.h>

#include <utility>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/grad_list.h"

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

GradStates GradSlots::states(const Borrowed& params, const Borrowed& views, size_t first, InPlace in_place,
                             int64_t least_numel, IsAlone is_alone) const {
  TORCH_CHECK_VALUE(params.size() == views.size() && first + params.size() <= slots_.size(),
                    "states: expected one view per parameter, and a slot for each, got ", views.size(), " views of ",
                    params.size(), " parameters from slot ", first, " on, of ", slots_.size());
  GradStates found{std::string(params.size(), static_cast<char>(GradState::NONE)), {}};
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Slot& slot = slots_[first + i];
    if (grad.is_same(*views[i]) && (!places_.has_value() || places_->is_intact(first + i, grad))) {
      found.states[i] = static_cast<char>(GradState::IN_BUFFER);
      return;
    }
    found.states[i] = static_cast<char>(GradState::ELSEWHERE);
    // Slots, of another gradient or a parameter, may be written before they are read.
    bool stays = in_place != InPlace::NO && slot.numel >= least_numel && is_readable(grad, slot) && !is_slot(grad);
    if (stays && in_place == InPlace::READ) stays = !was_stepped(grad, first + i);
    if (stays && in_place == InPlace::WRITE) {
      stays = grad.scalar_type() == slot.dtype && !grad.requires_grad() && allocated_by_torch(grad) && is_alone(grad);
    }
    if (!stays) found.to_gather.push_back(static_cast<int64_t>(first + i));
  });
  return found;
}

at::Tensor GradSlots::grad_list(const Borrowed& params, size_t first, int64_t numel, bool stepped) {
  TORCH_CHECK_VALUE(!params.empty() && first + params.size() <= slots_.size(), "grad_list: expected parameters of the ",
                    slots_.size(), " slots, got ", params.size(), " from slot ", first, " on");
  if (stepped && stepped_.empty()) {
    const Remembered none(c10::intrusive_ptr<c10::StorageImpl>{});
    stepped_.resize(slots_.size(), none);
  }
  GradList grads(numel, params.size());
  const int64_t begin = slots_[first].offset;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Slot& slot = slots_[first + i];
    TORCH_CHECK_VALUE(is_readable(grad, slot), "grad_list: the gradient of parameter ", first + i, ", ",
                      grad.toString(), " of shape ", grad.sizes(), " with strides ", grad.strides(),
                      ", cannot be read where it is");
    grads.add(grad, slot.offset - begin);
    if (stepped && !was_stepped(grad, first + i)) stepped_[first + i] = grad.storage().getWeakStorageImpl();
  });
  return as_operand(std::move(grads), numel, slots_[first].dtype);
}

std::vector<int64_t> GradSlots::share(const Borrowed& sources, const Borrowed& params, int64_t least_numel,
                                      IsAlone is_alone) const {
  TORCH_CHECK_VALUE(sources.size() == slots_.size() && params.size() == slots_.size(), "share: expected ",
                    slots_.size(), " sources and parameters, got ", sources.size(), " and ", params.size());
  std::vector<int64_t> others;
  look_at_grads(sources, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined() || sources[i]->is_same(*params[i])) return;
    // Other references to its memory (a bucket of DistributedDataParallel, DLPack) would not follow when it is
    // copied.
    const bool shares =
        slots_[i].numel >= least_numel && is_readable(grad, slots_[i]) && !is_slot(grad) && is_alone(grad);
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
