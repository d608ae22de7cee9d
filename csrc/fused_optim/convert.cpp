// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/convert.h"

#include "fused_optim/vectors.h"

#ifdef APEX_NPU_AVX2
#include <immintrin.h>
#endif

namespace apex_npu {
namespace {

using c10::ScalarType;

#ifdef APEX_NPU_AVX2
// The number of elements to prefetch ahead. Loops convert blocks of a stream, and nothing else fetches the next block.
constexpr int64_t kAhead = 4 * kBlockNumel;

// The processor's own conversions. The rounding mode is to nearest.
APEX_NPU_AVX2 void half_to_float_f16c(const Half* src, float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (i % kLine<Half*> == 0) APEX_NPU_PREFETCH(src + i + kAhead);
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) dst[i] = src[i];
}

APEX_NPU_AVX2 void float_to_half_f16c(const float* src, Half* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (i % kLine<Half*> == 0) APEX_NPU_PREFETCH(dst + i + kAhead);
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), halves);
  }
  for (; i < n; ++i) dst[i] = src[i];
}
#endif

}  // namespace

void widen(const void* src, ScalarType dtype, float* dst, int64_t n) {
  if (dtype == ScalarType::BFloat16) {
    vectorized(Copy(), static_cast<const BFloat16*>(src), dst, n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx2()) {
    half_to_float_f16c(static_cast<const Half*>(src), dst, n);
#endif
  } else {
    vectorized(Copy(), static_cast<const Half*>(src), dst, n);
  }
}

void narrow(const float* src, void* dst, ScalarType dtype, int64_t n) {
  if (dtype == ScalarType::BFloat16) {
    vectorized(Copy(), src, static_cast<BFloat16*>(dst), n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx2()) {
    float_to_half_f16c(src, static_cast<Half*>(dst), n);
#endif
  } else {
    vectorized(Copy(), src, static_cast<Half*>(dst), n);
  }
}

}  // namespace apex_npu
