// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records the places of tensors when they were fused, and finds the tensors that have moved since, in one call.
#pragma once

#include <cstdint>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Holds places, not tensors: a reference would make torch.utils.swap_tensors fail.
class SlotTable {
 public:
  explicit SlotTable(const std::vector<at::Tensor>& tensors);

  size_t size() const { return places_.size(); }

  // Returns the indices of the tensors whose address, size, stride, dtype or device has changed.
  std::vector<int64_t> broken(const Borrowed& tensors) const;

  // Returns whether a tensor has the recorded address, size, stride, dtype and device of the i-th tensor.
  bool is_intact(size_t i, const at::Tensor& t) const;

 private:
  // shapes_ has `dim` sizes and `dim` strides from index `shape` on.
  struct Place {
    const void* address;
    size_t shape;
    int64_t dim;
    c10::ScalarType dtype;
    c10::Device device;
  };
  static const void* address_of(const at::Tensor& t);

  std::vector<Place> places_;
  std::vector<int64_t> shapes_;
};

}  // namespace apex_npu
