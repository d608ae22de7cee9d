// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/state_codec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#ifdef APEX_NPU_AVX2
#ifndef __clang__  // GCC 12 warns about its own _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace apex_npu {
namespace {

// Philox4x32-10 (Salmon et al. 2011) with this key.
constexpr uint32_t kKey0 = 0x243f6a88u, kKey1 = 0x85a308d3u;
constexpr int kCounters = kBlockNumel / (4 * kGroup);

struct Counters {
  uint64_t first;  // one counter for every 64 elements
  uint32_t position, count, pair;

  APEX_NPU_INLINE uint32_t upper() const { return static_cast<uint32_t>(first >> 32) << 8 | pair; }
};

// words[4 · j + k] is the k-th word of counter j.
struct Philox {
  APEX_NPU_INLINE void operator()(uint32_t* words, Counters counters) const {
    uint32_t c[4][kCounters];
    for (int j = 0; j < kCounters; ++j) {
      c[0][j] = static_cast<uint32_t>(counters.first) + static_cast<uint32_t>(j);
      c[1][j] = counters.upper();
      c[2][j] = counters.count;
      c[3][j] = counters.position;
    }
    uint32_t key0 = kKey0, key1 = kKey1;
    for (int round = 0; round < 10; ++round, key0 += kWeyl, key1 += 0xbb67ae85u) {
#pragma omp simd
      for (int j = 0; j < kCounters; ++j) {
        const uint64_t a = static_cast<uint64_t>(c[0][j]) * 0xd2511f53u,
                       b = static_cast<uint64_t>(c[2][j]) * 0xcd9e8d57u;
        c[0][j] = static_cast<uint32_t>(b >> 32) ^ c[1][j] ^ key0;
        c[1][j] = static_cast<uint32_t>(b);
        c[2][j] = static_cast<uint32_t>(a >> 32) ^ c[3][j] ^ key1;
        c[3][j] = static_cast<uint32_t>(a);
      }
    }
    for (int j = 0; j < kCounters; ++j) {
      for (int k = 0; k < 4; ++k) words[4 * j + k] = c[k][j];
    }
  }
};

#ifdef APEX_NPU_AVX2
// The same with each word in 64 bits, so that nothing is packed between rounds. Twice as fast as the loop above.
APEX_NPU_AVX2 void philox_avx2(uint32_t* words, Counters counters) {
  const __m256i m0 = _mm256_set1_epi64x(0xd2511f53), m1 = _mm256_set1_epi64x(0xcd9e8d57);
  __m256i c[2][4];
  for (int half = 0; half < 2; ++half) {
    // Only the lower 32 bits of each number are used.
    const auto first = static_cast<int64_t>(counters.first) + 4 * half;
    c[half][0] = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_set_epi64x(3, 2, 1, 0));
    c[half][1] = _mm256_set1_epi64x(counters.upper());
    c[half][2] = _mm256_set1_epi64x(counters.count);
    c[half][3] = _mm256_set1_epi64x(counters.position);
  }
  uint32_t key0 = kKey0, key1 = kKey1;
  for (int round = 0; round < 10; ++round, key0 += kWeyl, key1 += 0xbb67ae85u) {
    const __m256i k0 = _mm256_set1_epi64x(key0), k1 = _mm256_set1_epi64x(key1);
    for (auto& w : c) {
      const __m256i a = _mm256_mul_epu32(w[0], m0), b = _mm256_mul_epu32(w[2], m1);
      w[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), w[1]), k0);
      w[1] = b;
      w[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), w[3]), k1);
      w[3] = a;
    }
  }
  for (int half = 0; half < 2; ++half) {
    const __m256i* w = c[half];
    const __m256i lower = _mm256_blend_epi32(w[0], _mm256_slli_epi64(w[1], 32), 0xaa);
    const __m256i upper = _mm256_blend_epi32(w[2], _mm256_slli_epi64(w[3], 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(lower, upper), odd = _mm256_unpackhi_epi64(lower, upper);
    auto* to = reinterpret_cast<__m256i*>(words + 16 * half);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}
#endif

// Returns 1 + u, where u in (0, 1) has 12 of an element's 16 random bits. u is far enough from 0 and 1 that the
// rounding of float32 cannot change a value that is exactly a code.
template <bool kUpper>
APEX_NPU_INLINE float one_and_more(uint32_t random) {
  const uint32_t bits = (kUpper ? random >> 9 : random << 7) & 0x007ff800u;  // the upper bits of a mantissa
  return bit_cast<float>(bits | 0x3f800400u);
}

// The number of elements by which prefetching is ahead of decoding.
constexpr int64_t kAheadCodes = 4 * kBlockNumel;

template <typename Code>
struct DecodeBlocks {
  APEX_NPU_INLINE void operator()(const Code* codes, const float* scales, float* values, int64_t n) const {
    for (int64_t begin = 0; begin < n; begin += kScaleNumel) {
      const int64_t end = std::min(n, begin + kScaleNumel);
      const float scale = scales[begin / kScaleNumel];
      APEX_NPU_PREFETCH(codes + begin + kAheadCodes);
      APEX_NPU_PREFETCH(codes + begin + kAheadCodes + 64);
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const auto code = static_cast<float>(static_cast<int32_t>(codes[i]));
        if constexpr (std::is_signed_v<Code>) {
          values[i] = code * (1.0f / 127.0f) * scale;
        } else {
          values[i] = code * code * (1.0f / 65025.0f) * scale;
        }
      }
    }
  }
};

template <typename Code, bool kUpper>
struct EncodeBlocks {
  APEX_NPU_INLINE void operator()(float* values, Code* codes, float* scales, const uint32_t* words, int64_t n) const {
    // Loops of a constant length have no remainder. All scales are computed first, so that no block waits for its own.
    const int64_t whole = n - n % kScaleNumel;
    float* scale = scales;
    for (int64_t i = 0; i < whole; i += kScaleNumel) *scale++ = scale_of(values + i, kScaleNumel);
    if (whole < n) *scale = scale_of(values + whole, n - whole);
    scale = scales;
    for (int64_t i = 0; i < whole; i += kScaleNumel) {
      encode(values + i, codes + i, *scale++, words + i / kGroup, kScaleNumel);
    }
    if (whole < n) encode(values + whole, codes + whole, *scale, words + whole / kGroup, n - whole);
  }

  // Returns 0 if all values are encoded as 0, and nan if a value is inf or nan.
  static APEX_NPU_INLINE float scale_of(const float* values, int64_t n) {
    int32_t largest = 0;  // compares the bits of magnitudes, so that inf and nan are larger than all numbers
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
      const auto magnitude = static_cast<int32_t>(bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
      largest = largest > magnitude ? largest : magnitude;
    }
    if (largest >= static_cast<int32_t>(kFloatInf)) return std::numeric_limits<float>::quiet_NaN();
    const float scale = bit_cast<float>(largest);
    return scale < 0x1p-90f ? 0.0f : scale;
  }

  static APEX_NPU_INLINE void encode(float* values, Code* codes, float scale, const uint32_t* words, int64_t n) {
    if (!(scale > 0.0f)) {
      std::fill(codes, codes + n, Code(0));
      return;
    }
    float divisor = scale;
    if (scale > 0x1p125f) {  // its reciprocal would be denormal
      divisor *= 0x1p-4f;
      for (int64_t i = 0; i < n; ++i) values[i] *= 0x1p-4f;
    }
    const float inverse = 1.0f / divisor;
    // First replaces the values by codes of 32 bits, because a loop that also narrows them has narrower vectors.
    for (int64_t begin = 0; begin < n; begin += kGroup) {
      const uint32_t word = words[begin / kGroup];
      if (begin + kGroup <= n) {
        encode_group(values + begin, inverse, word, kGroup);
      } else {
        encode_group(values + begin, inverse, word, n - begin);
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<Code>(bit_cast<uint32_t>(values[i]) - kCodeOffset);
  }

  // The conversion to int32_t rounds positive numbers down, so the codes get an offset that makes them positive.
  static constexpr uint32_t kCodeOffset = std::is_signed_v<Code> ? 128 : 1;

  static APEX_NPU_INLINE void encode_group(float* values, float inverse, uint32_t word, int64_t n) {
    const auto count = static_cast<uint32_t>(n);
#pragma omp simd
    for (uint32_t i = 0; i < count; ++i) {
      const float ratio = values[i] * inverse, u = one_and_more<kUpper>(word + kWeyl * i);
      // Can exceed 127 or 255 only by the rounding of float32, for which u leaves room.
      float code;
      if constexpr (std::is_signed_v<Code>) {
        code = ratio * 127.0f + 127.0f + u;
      } else {
        const uint32_t positive = mask_of(values[i] > 0.0f);
        const float rounded = std::sqrt(bit_cast<float>(bit_cast<uint32_t>(ratio) & positive)) * 255.0f + u;
        // Only 0 becomes 0, because the rules divide by the state.
        const float least = bit_cast<float>(bit_cast<uint32_t>(2.0f) & positive);
        code = rounded > least ? rounded : least;
      }
      values[i] = bit_cast<float>(static_cast<int32_t>(code));
    }
  }
};

}  // namespace

Encoding::Encoding(const std::optional<at::Tensor>& remainder, at::TensorList scales, const at::Tensor& table,
                   int64_t count, bool stochastic_param)
    : remainder_(remainder),
      scales_(scales.begin(), scales.end()),
      count_(static_cast<uint32_t>(count)),
      stochastic_param_(stochastic_param) {
  TORCH_CHECK_TYPE(table.device().is_cpu() && table.scalar_type() == at::kLong && table.dim() == 2 &&
                       table.size(1) == 4 && table.is_contiguous(),
                   "table must be int64, contiguous, on the cpu and of 4 columns, got ", table.toString(), " of shape ",
                   table.sizes());
  const int64_t* row = table.const_data_ptr<int64_t>();
  empty_ = table.size(0) == 0;
  int64_t blocks = 0;
  for (int64_t i = 0; i < table.size(0); ++i, row += 4) {
    TORCH_CHECK_VALUE(row[0] >= end() && row[1] >= 0 && row[3] >= 0, "table: segment ", i, " begins at ", row[0],
                      ", before the end of the one before it, or a number is negative");
    segments_.push_back({row[0], row[1], row[2], row[3]});
    blocks += (row[1] + kBlockNumel - 1) / kBlockNumel;
    block_ends_.push_back(blocks);
    scale_count_ = std::max(scale_count_, row[3] + (row[1] + kScaleNumel - 1) / kScaleNumel);
  }
}

void Encoding::check(const char* op, int64_t i, int64_t begin, int64_t numel) const {
  const bool has = i < static_cast<int64_t>(segments_.size());
  TORCH_CHECK_VALUE(has && segments_[i].begin == begin && segments_[i].numel == numel, op, ": parameter ", i, " has ",
                    numel, " elements from ", begin, " on, and table, of ", segments_.size(), " rows, none for them");
}

RandomWords::RandomWords(int64_t first, uint32_t position, uint32_t count, uint32_t pair) {
  const Counters counters = {static_cast<uint64_t>(first / (4 * kGroup)), position, count, pair};
#ifdef APEX_NPU_AVX2
  if (has_avx2()) {
    static_assert(kCounters == 8);
    philox_avx2(words, counters);
    return;
  }
#endif
  vectorized(Philox(), static_cast<uint32_t*>(words), counters);
}

void decode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, int64_t n) {
  if (state.dtype == at::kBFloat16) {
    vectorized_wide(Copy(), NarrowValues<>{static_cast<const BFloat16*>(state.data) + at}, values, n);
  } else if (state.dtype == at::kChar) {
    vectorized_wide(DecodeBlocks<int8_t>(), static_cast<const int8_t*>(state.data) + at,
                    static_cast<const float*>(state.scales) + scale, values, n);
  } else {
    vectorized_wide(DecodeBlocks<uint8_t>(), static_cast<const uint8_t*>(state.data) + at,
                    static_cast<const float*>(state.scales) + scale, values, n);
  }
}

namespace {

template <int kHalf>
void encode_half(const StateBuffer& state, int64_t at, int64_t scale, float* values, const uint32_t* words, int64_t n) {
  if (state.dtype == at::kBFloat16) {
    const RoundedValues<kHalf> stored = {static_cast<BFloat16*>(state.data) + at, words};
    vectorized_wide(Copy(), static_cast<const float*>(values), stored, n);
  } else if (state.dtype == at::kChar) {
    vectorized_wide(EncodeBlocks<int8_t, kHalf == 1>(), values, static_cast<int8_t*>(state.data) + at,
                    state.scales + scale, words, n);
  } else {
    vectorized_wide(EncodeBlocks<uint8_t, kHalf == 1>(), values, static_cast<uint8_t*>(state.data) + at,
                    state.scales + scale, words, n);
  }
}

}  // namespace

void encode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, const RandomWords& random,
                  int half, int64_t n) {
  if (half == 0) {
    encode_half<0>(state, at, scale, values, random.words, n);
  } else {
    encode_half<1>(state, at, scale, values, random.words, n);
  }
}

#ifdef APEX_NPU_AVX2
namespace {

// The values in `join` and `split` that depend only on the float16 parameters, for 16 of them.
struct HalfBounds {
  __m256i magnitude, largest, is_finite;

  APEX_NPU_AVX2 explicit HalfBounds(__m256i halves) {
    magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
    const __m256i from_0x200 = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x1ff));  // -1 if true
    const __m256i is_normal = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x3ff));
    const __m256i one_or_two = _mm256_sub_epi16(_mm256_set1_epi16(1), from_0x200);
    const __m256i to_below_tie = _mm256_sub_epi16(one_or_two, _mm256_add_epi16(is_normal, is_normal));
    const __m256i odd = _mm256_srai_epi16(_mm256_slli_epi16(magnitude, 15), 15);
    largest = _mm256_sub_epi16(_mm256_set1_epi16(0x4000), _mm256_and_si256(odd, to_below_tie));
    is_finite = _mm256_cmpgt_epi16(_mm256_set1_epi16(0x7c00), magnitude);
  }
};

// Returns the exponent bits of the float32 magnitudes; for subnormal float16 numbers, those of the least normal number.
APEX_NPU_AVX2 inline __m256i exponents_of(__m256 magnitudes) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(magnitudes), _mm256_set1_epi32(0x7f800000));
  return _mm256_max_epi32(bits, _mm256_set1_epi32(113 << 23));
}

APEX_NPU_AVX2 inline __m256 joined(__m128i magnitudes, __m128i units, __m128i signs) {
  const __m256 rounded = _mm256_cvtph_ps(magnitudes);
  const __m256i unit = _mm256_sub_epi32(exponents_of(rounded), _mm256_set1_epi32(25 << 23));
  const __m256 lacking = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(units)), _mm256_castsi256_ps(unit));
  const __m256i sign = _mm256_slli_epi32(_mm256_cvtepu16_epi32(signs), 16);
  return _mm256_xor_ps(_mm256_add_ps(rounded, lacking), _mm256_castsi256_ps(sign));
}

// Computes `join` for 16 numbers at a time.
APEX_NPU_AVX2 void join_f16c(const Half* param, const int16_t* remainder, float* values, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    APEX_NPU_PREFETCH(param + i + kBlockNumel);
    APEX_NPU_PREFETCH(remainder + i + kBlockNumel);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(param + i));
    const __m256i kept = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainder + i));
    const HalfBounds bounds(halves);
    const __m256i negative = _mm256_srai_epi16(halves, 15);
    const __m256i fraction = _mm256_and_si256(halves, _mm256_set1_epi16(0x3ff));
    const __m256i is_power = _mm256_and_si256(_mm256_cmpeq_epi16(fraction, _mm256_setzero_si256()),
                                              _mm256_cmpgt_epi16(bounds.magnitude, _mm256_set1_epi16(0x400)));
    const __m256i inward = _mm256_blendv_epi8(bounds.largest, _mm256_set1_epi16(0x2000), is_power);
    const __m256i away = _mm256_subs_epi16(_mm256_xor_si256(kept, negative), negative);
    const __m256i clamped =
        _mm256_min_epi16(_mm256_max_epi16(away, _mm256_sub_epi16(_mm256_setzero_si256(), inward)), bounds.largest);
    const __m256i units = _mm256_and_si256(clamped, bounds.is_finite);
    const __m256i signs = _mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    _mm256_storeu_ps(values + i, joined(_mm256_castsi256_si128(bounds.magnitude), _mm256_castsi256_si128(units),
                                        _mm256_castsi256_si128(signs)));
    _mm256_storeu_ps(values + i + 8, joined(_mm256_extracti128_si256(bounds.magnitude, 1),
                                            _mm256_extracti128_si256(units, 1), _mm256_extracti128_si256(signs, 1)));
  }
  for (; i < n; ++i) values[i] = join(param[i], remainder[i]);
}

// Returns the rounding errors of 8 numbers, as whole units.
APEX_NPU_AVX2 inline __m256i lacking(__m256 values, __m128i halves) {
  const __m256 rounded = _mm256_cvtph_ps(halves);
  const __m256i scale = _mm256_sub_epi32(_mm256_set1_epi32(279 << 23), exponents_of(rounded));
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(values, rounded), _mm256_castsi256_ps(scale)));
}

// Computes `split` for 16 numbers at a time.
APEX_NPU_AVX2 void split_f16c(const float* values, Half* param, int16_t* remainder, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 first = _mm256_loadu_ps(values + i), second = _mm256_loadu_ps(values + i + 8);
    const __m128i low = _mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT);
    const __m256i halves = _mm256_set_m128i(high, low);
    const HalfBounds bounds(halves);
    const __m256i packed = _mm256_packs_epi32(lacking(first, low), lacking(second, high));
    const __m256i units = _mm256_permute4x64_epi64(packed, 0xd8);  // in the order of the numbers
    const __m256i least = _mm256_sub_epi16(_mm256_setzero_si256(), bounds.largest);
    const __m256i clamped = _mm256_min_epi16(_mm256_max_epi16(units, least), bounds.largest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(param + i), halves);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainder + i), _mm256_and_si256(clamped, bounds.is_finite));
  }
  for (; i < n; ++i) split(values[i], param + i, remainder + i);
}

// The same with AVX-512, for 32 numbers at a time.
struct WideHalfBounds {
  __m512i magnitude, largest;
  __mmask32 is_finite;

  APEX_NPU_AVX512 explicit WideHalfBounds(__m512i halves) {
    magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    const __m512i one = _mm512_set1_epi16(1), tie = _mm512_set1_epi16(0x4000);
    const __mmask32 from_0x200 = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x1ff));
    const __mmask32 is_normal = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x3ff));
    const __m512i one_or_two = _mm512_mask_add_epi16(one, from_0x200, one, one);
    const __m512i to_below_tie = _mm512_mask_add_epi16(one_or_two, is_normal, one_or_two, _mm512_set1_epi16(2));
    largest = _mm512_mask_sub_epi16(tie, _mm512_test_epi16_mask(magnitude, one), tie, to_below_tie);
    is_finite = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(0x7c00));
  }
};

APEX_NPU_AVX512 inline __m512i exponents_of(__m512 magnitudes) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(magnitudes), _mm512_set1_epi32(0x7f800000));
  return _mm512_max_epi32(bits, _mm512_set1_epi32(113 << 23));
}

APEX_NPU_AVX512 inline __m512 joined(__m256i magnitudes, __m256i units, __mmask16 is_negative) {
  const __m512 rounded = _mm512_cvtph_ps(magnitudes);
  const __m512i unit = _mm512_sub_epi32(exponents_of(rounded), _mm512_set1_epi32(25 << 23));
  const __m512 lacking = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(units)), _mm512_castsi512_ps(unit));
  const __m512i value = _mm512_castps_si512(_mm512_add_ps(rounded, lacking));
  const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
  return _mm512_castsi512_ps(_mm512_mask_xor_epi32(value, is_negative, value, sign));
}

APEX_NPU_AVX512 void join_avx512(const Half* param, const int16_t* remainder, float* values, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    APEX_NPU_PREFETCH(param + i + kBlockNumel);
    APEX_NPU_PREFETCH(remainder + i + kBlockNumel);
    const __m512i halves = _mm512_loadu_si512(param + i), kept = _mm512_loadu_si512(remainder + i);
    const WideHalfBounds bounds(halves);
    const __m512i zero = _mm512_setzero_si512();
    const __mmask32 is_negative = _mm512_movepi16_mask(halves);
    const __mmask32 is_power = _mm512_testn_epi16_mask(halves, _mm512_set1_epi16(0x3ff)) &
                               _mm512_cmpgt_epi16_mask(bounds.magnitude, _mm512_set1_epi16(0x400));
    const __m512i inward = _mm512_mask_mov_epi16(bounds.largest, is_power, _mm512_set1_epi16(0x2000));
    const __m512i away = _mm512_mask_subs_epi16(kept, is_negative, zero, kept);
    const __m512i clamped = _mm512_min_epi16(_mm512_max_epi16(away, _mm512_sub_epi16(zero, inward)), bounds.largest);
    const __m512i units = _mm512_maskz_mov_epi16(bounds.is_finite, clamped);
    _mm512_storeu_ps(values + i, joined(_mm512_castsi512_si256(bounds.magnitude), _mm512_castsi512_si256(units),
                                        static_cast<__mmask16>(is_negative)));
    _mm512_storeu_ps(values + i + 16,
                     joined(_mm512_extracti64x4_epi64(bounds.magnitude, 1), _mm512_extracti64x4_epi64(units, 1),
                            static_cast<__mmask16>(is_negative >> 16)));
  }
  join_f16c(param + i, remainder + i, values + i, n - i);
}

APEX_NPU_AVX512 inline __m256i lacking(__m512 values, __m256i halves) {
  const __m512 rounded = _mm512_cvtph_ps(halves);
  const __m512i scale = _mm512_sub_epi32(_mm512_set1_epi32(279 << 23), exponents_of(rounded));
  const __m512 units = _mm512_mul_ps(_mm512_sub_ps(values, rounded), _mm512_castsi512_ps(scale));
  return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(units));
}

APEX_NPU_AVX512 void split_avx512(const float* values, Half* param, int16_t* remainder, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512 first = _mm512_loadu_ps(values + i), second = _mm512_loadu_ps(values + i + 16);
    const __m256i low = _mm512_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(second, _MM_FROUND_TO_NEAREST_INT);
    const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    const WideHalfBounds bounds(halves);
    const __m512i units = _mm512_inserti64x4(_mm512_castsi256_si512(lacking(first, low)), lacking(second, high), 1);
    const __m512i least = _mm512_sub_epi16(_mm512_setzero_si512(), bounds.largest);
    const __m512i clamped = _mm512_min_epi16(_mm512_max_epi16(units, least), bounds.largest);
    _mm512_storeu_si512(param + i, halves);
    _mm512_storeu_si512(remainder + i, _mm512_maskz_mov_epi16(bounds.is_finite, clamped));
  }
  split_f16c(values + i, param + i, remainder + i, n - i);
}

}  // namespace
#endif

void decode_remainder(void* param, at::ScalarType dtype, int16_t* remainder, float* values, int64_t n) {
  if (dtype != at::kHalf) {
    vectorized_wide(Copy(), RemainderValues<BFloat16>{static_cast<BFloat16*>(param), remainder}, values, n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx512()) {
    join_avx512(static_cast<const Half*>(param), remainder, values, n);
  } else if (has_avx2()) {
    join_f16c(static_cast<const Half*>(param), remainder, values, n);
#endif
  } else {
    vectorized_wide(Copy(), RemainderValues<Half>{static_cast<Half*>(param), remainder}, values, n);
  }
}

void encode_remainder(const float* values, void* param, at::ScalarType dtype, int16_t* remainder, int64_t n) {
  if (dtype != at::kHalf) {
    vectorized_wide(Copy(), values, RemainderValues<BFloat16>{static_cast<BFloat16*>(param), remainder}, n);
#ifdef APEX_NPU_AVX2
  } else if (has_avx512()) {
    split_avx512(values, static_cast<Half*>(param), remainder, n);
  } else if (has_avx2()) {
    split_f16c(values, static_cast<Half*>(param), remainder, n);
#endif
  } else {
    vectorized_wide(Copy(), values, RemainderValues<Half>{static_cast<Half*>(param), remainder}, n);
  }
}

void narrow_stochastically(const float* values, BFloat16* rounded, const RandomWords& random, int64_t n) {
  vectorized_wide(Copy(), values, RoundedValues<0>{rounded, random.words}, n);
}

}  // namespace apex_npu
