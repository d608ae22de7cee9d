// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/dot.h"

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

#ifdef APEX_NPU_AVX2
#include <immintrin.h>
#endif

namespace apex_npu {
namespace {

constexpr int kLanes = 16;

// The number of elements to prefetch ahead. Without prefetching, a core that only reads does not use the full memory
// bandwidth.
template <typename T>
constexpr int64_t kAhead = 4096 / sizeof(T);

// The products of every kLanes-th pair of elements are added to one partial sum, in double. The partial sums stay in
// registers, several additions overlap, and the order of additions is equal for vectors of all widths.
struct Dot {
  template <typename T>
  APEX_NPU_INLINE double operator()(const T* a, const T* b, int64_t n) const {
    double sum = 0;
    int64_t i = 0;
    if (n >= kLanes) {
      double lanes[kLanes];
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) lanes[k] = product(a[k], b[k]);  // zeros would put the lanes into memory
      for (i = kLanes; i + kLanes <= n; i += kLanes) {
        APEX_NPU_PREFETCH(a + i + kAhead<T>);
        if (a != b) APEX_NPU_PREFETCH(b + i + kAhead<T>);
#pragma omp simd
        for (int k = 0; k < kLanes; ++k) lanes[k] += product(a[i + k], b[i + k]);
      }
      for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
      }
      sum = lanes[0];
    }
    for (; i < n; ++i) sum += product(a[i], b[i]);
    return sum;
  }

  template <typename T>
  static APEX_NPU_INLINE double product(T a, T b) {
    return static_cast<double>(a) * static_cast<double>(b);
  }
};

// As a dot product with itself, with half the loads and conversions.
struct SumOfSquares {
  template <typename T>
  APEX_NPU_INLINE double operator()(const T* a, int64_t n) const {
    return Dot()(a, a, n);
  }
};

#ifdef APEX_NPU_AVX2
// SumOfSquares in the same order, with the processor's own conversion.
APEX_NPU_AVX2 double sum_of_half_squares_f16c(const Half* x, int64_t n) {
  double sum = 0;
  int64_t i = 0;
  if (n >= kLanes) {
    __m256d lanes[kLanes / 4] = {};  // 0 + x is x, for squares
    for (; i + kLanes <= n; i += kLanes) {
      if (i % (2 * kLanes) == 0) APEX_NPU_PREFETCH(x + i + kAhead<Half>);
      for (int half = 0; half < 2; ++half) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i + 8 * half)));
        const __m256 square = _mm256_mul_ps(wide, wide);  // exact: twice 11 bits
        lanes[2 * half] = _mm256_add_pd(lanes[2 * half], _mm256_cvtps_pd(_mm256_castps256_ps128(square)));
        lanes[2 * half + 1] = _mm256_add_pd(lanes[2 * half + 1], _mm256_cvtps_pd(_mm256_extractf128_ps(square, 1)));
      }
    }
    // The number of lanes is halved until one is left, as in Dot.
    lanes[0] = _mm256_add_pd(lanes[0], lanes[2]);
    lanes[1] = _mm256_add_pd(lanes[1], lanes[3]);
    const __m256d four = _mm256_add_pd(lanes[0], lanes[1]);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    sum = _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
  for (; i < n; ++i) sum += Dot::product(x[i], x[i]);
  return sum;
}
#endif

template <typename T>
double dot_of(const T* a, const T* b, int64_t n) {
  return a == b ? vectorized(SumOfSquares(), a, n) : vectorized(Dot(), a, b, n);
}

}  // namespace

double dot(const float* a, const float* b, int64_t n) { return dot_of(a, b, n); }

double dot(const double* a, const double* b, int64_t n) { return dot_of(a, b, n); }

double sum_of_squares(const void* x, c10::ScalarType dtype, int64_t n) {
  if (dtype == c10::ScalarType::BFloat16) return vectorized(SumOfSquares(), static_cast<const BFloat16*>(x), n);
#ifdef APEX_NPU_AVX2
  if (has_avx2()) return sum_of_half_squares_f16c(static_cast<const Half*>(x), n);
#endif
  return vectorized(SumOfSquares(), static_cast<const Half*>(x), n);
}

}  // namespace apex_npu
