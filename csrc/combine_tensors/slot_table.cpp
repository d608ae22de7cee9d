// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/slot_table.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace apex_npu {

// storage().data() is the const accessor: it does not materialise a copy-on-write storage, as data_ptr() would.
const void* SlotTable::address_of(const at::Tensor& t) {
  return static_cast<const char*>(t.storage().data()) + t.storage_offset() * static_cast<int64_t>(t.dtype().itemsize());
}

SlotTable::SlotTable(const std::vector<at::Tensor>& tensors) {
  places_.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    places_.push_back({address_of(t), shapes_.size(), t.dim(), t.scalar_type(), t.device()});
    shapes_.insert(shapes_.end(), t.sizes().begin(), t.sizes().end());
    shapes_.insert(shapes_.end(), t.strides().begin(), t.strides().end());
  }
}

bool SlotTable::is_intact(size_t i, const at::Tensor& t) const {
  const Place& place = places_[i];
  if (t.layout() != c10::kStrided || t.scalar_type() != place.dtype || t.device() != place.device ||
      t.dim() != place.dim) {
    return false;
  }
  const int64_t* shape = shapes_.data() + place.shape;
  return std::equal(t.sizes().begin(), t.sizes().end(), shape) &&
         std::equal(t.strides().begin(), t.strides().end(), shape + place.dim) && address_of(t) == place.address;
}

std::vector<int64_t> SlotTable::broken(const Borrowed& tensors) const {
  TORCH_CHECK_VALUE(tensors.size() == places_.size(), "broken: expected ", places_.size(), " tensors, got ",
                    tensors.size());
  std::vector<int64_t> indices;
  look_at_each(tensors, prefetch_storage, [&](size_t i) {
    if (!is_intact(i, *tensors[i])) indices.push_back(static_cast<int64_t>(i));
  });
  return indices;
}

}  // namespace apex_npu
