// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Copies, widens, multiplies and checks gradients in one pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "prefetch.h"

namespace apex_npu {

// The address of an element, and its dtype.
struct Place {
  Place(const at::Tensor& t, const void* data) : dtype(t.scalar_type()), data(static_cast<const char*>(data)) {}
  Place(at::ScalarType dtype, const char* data) : dtype(dtype), data(data) {}

  int64_t nbytes(int64_t n) const { return n * static_cast<int64_t>(c10::elementSize(dtype)); }

  // Returns the place of the i-th element from here.
  Place from(int64_t i) const { return {dtype, data + nbytes(i)}; }

  // Prefetches the beginning of n elements that do not follow others in memory. The hardware cannot predict them.
  void prefetch(int64_t n) const {
    constexpr int64_t kHeadBytes = 1024;
    prefetch_bytes(data, std::min(kHeadBytes, nbytes(n)));
  }

  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
  template <typename T>
  T* as_written() const {
    return reinterpret_cast<T*>(const_cast<char*>(data));
  }

  at::ScalarType dtype;
  const char* data;
};

// Computes slot[i] = grad[i] * inv_scale for n elements, rounded once. Returns whether an element of grad is inf or
// nan. Both may be float16, bfloat16, float32 or float64, and they may be the same place.
bool unscale(const Place& slot, const Place& grad, double inv_scale, int64_t n);

// Computes slot[i] += grad[i] * inv_scale for n elements of a float32 slot. Returns whether a sum is inf or nan.
bool accumulate(const Place& slot, const Place& grad, double inv_scale, int64_t n);

// Returns whether one of n elements is inf or nan.
bool has_nonfinite(const Place& grad, int64_t n);

}  // namespace apex_npu
