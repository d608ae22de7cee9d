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

// The number of elements to prefetch ahead. Loops convert blocks of a stream, and nothing else fetches the next block.
constexpr int64_t kAhead = 4 * kBlockNumel;

// A cache line of 16-bit words.
constexpr int64_t kLine = 32;

// Calls convert(i) for each i in [0, n), and prefetches `words` (16 bits wide, read or written).
template <typename Words, typename Convert>
APEX_NPU_INLINE void for_each_line(int64_t n, Words* words, const Convert& convert) {
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    APEX_NPU_PREFETCH(words + i + kAhead);
#pragma omp simd
    for (int64_t j = i; j < i + kLine; ++j) convert(j);
  }
#pragma omp simd
  for (int64_t j = i; j < n; ++j) convert(j);
}

struct HalfToFloat {
  APEX_NPU_INLINE void operator()(const uint16_t* src, float* dst, int64_t n) const {
    for_each_line(n, src, [=](int64_t i) APEX_NPU_INLINE_LAMBDA { dst[i] = from_half(src[i]); });
  }
};

struct FloatToHalf {
  APEX_NPU_INLINE void operator()(const float* src, uint16_t* dst, int64_t n) const {
    for_each_line(n, dst, [=](int64_t i) APEX_NPU_INLINE_LAMBDA { dst[i] = to_half(src[i]); });
  }
};

struct BFloat16ToFloat {
  APEX_NPU_INLINE void operator()(const BFloat16* src, float* dst, int64_t n) const {
    for_each_line(n, src, [=](int64_t i) APEX_NPU_INLINE_LAMBDA { dst[i] = to_float(src[i]); });
  }
};

struct FloatToBFloat16 {
  APEX_NPU_INLINE void operator()(const float* src, BFloat16* dst, int64_t n) const {
    for_each_line(n, dst, [=](int64_t i) APEX_NPU_INLINE_LAMBDA { dst[i] = to_bfloat16(src[i]); });
  }
};

#ifdef APEX_NPU_AVX2
// The processor's own conversions. The rounding mode is to nearest.
APEX_NPU_AVX2 void half_to_float_f16c(const uint16_t* src, float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (i % kLine == 0) APEX_NPU_PREFETCH(src + i + kAhead);
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) dst[i] = from_half(src[i]);
}

APEX_NPU_AVX2 void float_to_half_f16c(const float* src, uint16_t* dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    if (i % kLine == 0) APEX_NPU_PREFETCH(dst + i + kAhead);
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), halves);
  }
  for (; i < n; ++i) dst[i] = to_half(src[i]);
}
#endif

}  // namespace

void widen(const void* src, ScalarType dtype, float* dst, int64_t n) {
  const auto* words = static_cast<const uint16_t*>(src);
  if (dtype == ScalarType::BFloat16) {
    vectorized(BFloat16ToFloat(), static_cast<const BFloat16*>(src), dst, n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx2()) {
    half_to_float_f16c(words, dst, n);
#endif
  } else {
    vectorized(HalfToFloat(), words, dst, n);
  }
}

void narrow(const float* src, void* dst, ScalarType dtype, int64_t n) {
  auto* words = static_cast<uint16_t*>(dst);
  if (dtype == ScalarType::BFloat16) {
    vectorized(FloatToBFloat16(), src, static_cast<BFloat16*>(dst), n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx2()) {
    float_to_half_f16c(src, words, n);
#endif
  } else {
    vectorized(FloatToHalf(), src, words, n);
  }
}

}  // namespace apex_npu
