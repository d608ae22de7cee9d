// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/dot.h"

#include "fused_optim/lanes.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

constexpr int kLanes = 16;

// Elements, 4 KiB of float: a core that only reads leaves the memory idle if it asks for no more than it adds up.
constexpr int64_t kAhead = 1024;

struct Dot {
  template <typename T>
  APEX_NPU_INLINE double operator()(const T* a, const T* b, int64_t n) const {
    double sum = 0;
    int64_t i = 0;
    if (n >= kLanes) {
      Lanes<kLanes> lanes;
      lanes.set_products(a, b);
      for (i = kLanes; i + kLanes <= n; i += kLanes) {
        APEX_NPU_PREFETCH(a + i + kAhead);
        if (a != b) APEX_NPU_PREFETCH(b + i + kAhead);
        lanes.add_products(a + i, b + i);
      }
      sum = lanes.total();
    }
    for (; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
  }
};

// Half the loads and conversions.
struct SumOfSquares {
  template <typename T>
  APEX_NPU_INLINE double operator()(const T* a, int64_t n) const {
    return Dot()(a, a, n);
  }
};

template <typename T>
double dot_of(const T* a, const T* b, int64_t n) {
  return a == b ? vectorized(SumOfSquares(), a, n) : vectorized(Dot(), a, b, n);
}

}  // namespace

double dot(const float* a, const float* b, int64_t n) { return dot_of(a, b, n); }

double dot(const double* a, const double* b, int64_t n) { return dot_of(a, b, n); }

}  // namespace apex_npu
