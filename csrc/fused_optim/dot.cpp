// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/dot.h"

#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

// Partial sums, so that several additions are in flight. Their number is the same for all vectors, hence the result.
constexpr int kLanes = 16;

struct Dot {
  template <typename T>
  APEX_NPU_INLINE double operator()(const T* a, const T* b, int64_t n) const {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
    }
    for (int k = 0; i < n; ++i, ++k) lanes[k] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    return sum;
  }
};

}  // namespace

double dot(const float* a, const float* b, int64_t n) { return vectorized(Dot(), a, b, n); }

double dot(const double* a, const double* b, int64_t n) { return vectorized(Dot(), a, b, n); }

}  // namespace apex_npu
