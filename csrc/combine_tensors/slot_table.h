// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Remembers where tensors lay when they were fused, and says in one call which of them are still there.
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

  // Indices of the tensors that have another address, size, stride, dtype or device than when the table was made.
  std::vector<int64_t> broken(const Borrowed& tensors) const;

  // Whether a tensor has the address, size, stride, dtype and device that the i-th had.
  bool is_intact(size_t i, const at::Tensor& t) const;

 private:
  // Of its sizes and strides, which are in shapes_ from `shape` on, there are `dim` each.
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
