// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sums whose order of additions is equal for vectors of all widths.
#pragma once

#include "fused_optim/vectors.h"

namespace apex_npu {

// A sum in double, as Count partial sums: the k-th of every Count elements is added to the k-th partial sum. The number
// of partial sums is constant: they stay in registers, several additions overlap, and wider vectors do not change the
// result.
template <int Count>
class Lanes {
 public:
  // Starts with products of Count elements each. Starting with zeros would put the lanes into memory.
  template <typename T>
  APEX_NPU_INLINE void set_products(const T* a, const T* b) {
#pragma omp simd
    for (int k = 0; k < Count; ++k) lanes_[k] = static_cast<double>(a[k]) * static_cast<double>(b[k]);
  }

  template <typename T>
  APEX_NPU_INLINE void add_products(const T* a, const T* b) {
#pragma omp simd
    for (int k = 0; k < Count; ++k) lanes_[k] += static_cast<double>(a[k]) * static_cast<double>(b[k]);
  }

  // Adds the squares of value(0), ..., value(Count - 1), or starts with them.
  template <bool kFirst, typename Value>
  APEX_NPU_INLINE void add_squares(const Value& value) {
#pragma omp simd
    for (int k = 0; k < Count; ++k) {
      const auto wide = static_cast<double>(value(k));
      lanes_[k] = kFirst ? wide * wide : lanes_[k] + wide * wide;
    }
  }

  APEX_NPU_INLINE double total() {
    for (int half = Count / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) lanes_[k] += lanes_[k + half];
    }
    return lanes_[0];
  }

 private:
  double lanes_[Count];
};

}  // namespace apex_npu
