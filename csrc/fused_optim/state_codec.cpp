// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/state_codec.h"

#include <algorithm>
#include <cmath>
#include <limits>

#ifdef APEX_NPU_AVX2
#include <immintrin.h>
#endif

namespace apex_npu {
namespace {

// Philox4x32-10 (Salmon et al. 2011) with this key. One word serves a group of 16 elements, each of which adds an
// offset of its own: multiples of 2^32 times the golden ratio.
constexpr uint32_t kKey0 = 0x243f6a88u, kKey1 = 0x85a308d3u;
constexpr uint32_t kWeyl = 0x9e3779b9u;
constexpr int kGroup = 16, kCounters = kBlockNumel / (4 * kGroup);

// To a neighbour in bfloat16: away from zero if `random`, 16 bits, and the bits that are cut off have a carry.
APEX_NPU_INLINE uint16_t round_stochastically(float value, uint32_t random) {
  const uint32_t nan = value != value ? ~0u : 0u;  // a mask rather than a branch, into which loads would be moved
  return static_cast<uint16_t>(((bit_cast<uint32_t>(value) | (nan & 0x00400000u)) + (random & ~nan)) >> 16);
}

struct Counters {
  uint64_t first;  // of 64 elements each
  uint32_t position, count, pair;

  APEX_NPU_INLINE uint32_t upper() const { return static_cast<uint32_t>(first >> 32) << 8 | pair; }
};

// words[4 · j + k]: the k-th of counter j.
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
// The same with one counter in 64 bits, which need not be packed between rounds: twice as fast as the loop above.
APEX_NPU_AVX2 void philox_avx2(uint32_t* words, Counters counters) {
  const __m256i m0 = _mm256_set1_epi64x(0xd2511f53), m1 = _mm256_set1_epi64x(0xcd9e8d57);
  __m256i c[2][4];
  for (int half = 0; half < 2; ++half) {
    // Of each number the lower 32 bits count.
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
    alignas(32) uint64_t wide[4][4];
    for (int k = 0; k < 4; ++k) _mm256_store_si256(reinterpret_cast<__m256i*>(wide[k]), c[half][k]);
    for (int j = 0; j < 4; ++j) {
      for (int k = 0; k < 4; ++k) words[16 * half + 4 * j + k] = static_cast<uint32_t>(wide[k][j]);
    }
  }
}
#endif

struct Spread {
  APEX_NPU_INLINE void operator()(const uint32_t* words, uint32_t* random) const {
    for (int64_t group = 0; group < kBlockNumel / kGroup; ++group) {
      const uint32_t word = words[group];
#pragma omp simd
      for (int k = 0; k < kGroup; ++k) random[group * kGroup + k] = word + kWeyl * static_cast<uint32_t>(k);
    }
  }
};

// 1 + u, where 12 of an element's 16 random bits make u, a number in (0, 1): never so near to 0 or 1 that a value that
// is a code, but for the rounding of float32, becomes another.
template <bool kUpper>
APEX_NPU_INLINE float one_and_more(uint32_t random) {
  const uint32_t bits = (kUpper ? random >> 9 : random << 7) & 0x007ff800u;  // the upper bits of a mantissa
  return bit_cast<float>(bits | 0x3f800400u);
}

// Elements that are fetched ahead of what is decoded.
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
  APEX_NPU_INLINE void operator()(float* values, Code* codes, float* scales, const uint32_t* random, int64_t n) const {
    int64_t begin = 0;
    // Loops of a constant length have no remainder.
    for (; begin + kScaleNumel <= n; begin += kScaleNumel) {
      *scales++ = encode(values + begin, codes + begin, random + begin, kScaleNumel);
    }
    if (begin < n) *scales = encode(values + begin, codes + begin, random + begin, n - begin);
  }

  // Returns the scale.
  static APEX_NPU_INLINE float encode(float* values, Code* codes, const uint32_t* random, int64_t n) {
    int32_t largest = 0;  // of the bits of magnitudes: so inf and nan are larger than numbers
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
      const auto magnitude = static_cast<int32_t>(bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
      largest = largest > magnitude ? largest : magnitude;
    }
    const float scale = bit_cast<float>(largest);
    const bool finite = largest < static_cast<int32_t>(kFloatInf);
    if (!finite || scale < 0x1p-90f) {
      std::fill(codes, codes + n, Code(0));
      return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    float divisor = scale;
    if (scale > 0x1p125f) {  // its reciprocal would be denormal
      divisor *= 0x1p-4f;
      for (int64_t i = 0; i < n; ++i) values[i] *= 0x1p-4f;
    }
    const float inverse = 1.0f / divisor;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float ratio = values[i] * inverse, u = one_and_more<kUpper>(random[i]);
      // Above 127 and 255 by the rounding of float32 alone, which u leaves room for.
      if constexpr (std::is_signed_v<Code>) {
        codes[i] = static_cast<Code>(static_cast<int32_t>(ratio * 127.0f + 127.0f + u) - 128);
      } else {
        const float t = std::sqrt(ratio > 0.0f ? ratio : 0.0f) * 255.0f;
        const int32_t least = values[i] > 0.0f ? 1 : 0;  // only a 0 becomes 0: it is divided by
        const int32_t code = static_cast<int32_t>(t + u) - 1;
        codes[i] = static_cast<Code>(code < least ? least : code);
      }
    }
    return scale;
  }
};

struct NarrowStochastically {
  APEX_NPU_INLINE void operator()(const float* values, BFloat16* rounded, const uint32_t* random, int shift,
                                  int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) rounded[i].bits = round_stochastically(values[i], (random[i] >> shift) & 0xffffu);
  }
};

struct DecodeRemainder {
  APEX_NPU_INLINE void operator()(const BFloat16* rounded, const int16_t* remainder, float* values, int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const int32_t upper = rounded[i].bits, magnitude = upper & 0x7fff, lower = remainder[i];
      // What a script has written to the parameter is the truth: a remainder that does not belong to it is none.
      const bool stale =
          (magnitude > 0x7f80) | ((magnitude == 0) & (lower < 0)) | ((magnitude == 0x7f80) & (lower > 0));
      const uint32_t bits = (static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(stale ? 0 : lower);
      values[i] = bit_cast<float>(bits);
    }
  }
};

struct EncodeRemainder {
  APEX_NPU_INLINE void operator()(const float* values, BFloat16* rounded, int16_t* remainder, int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const auto bits = bit_cast<uint32_t>(values[i]);
      const uint32_t kept = values[i] != values[i] ? (bits | 0x00400000u) & 0xffff0000u : bits;
      rounded[i].bits = static_cast<uint16_t>((kept + 0x8000u) >> 16);
      remainder[i] = static_cast<int16_t>(kept);
    }
  }
};

}  // namespace

const Encoding& Encoding::none() {
  static const Encoding none;
  return none;
}

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

void fill_random(uint32_t* random, int64_t first, uint32_t position, uint32_t count, uint32_t pair) {
  const Counters counters = {static_cast<uint64_t>(first / (4 * kGroup)), position, count, pair};
  uint32_t words[4 * kCounters];
#ifdef APEX_NPU_AVX2
  if (has_avx2()) {
    static_assert(kCounters == 8);
    philox_avx2(words, counters);
  } else {
    vectorized(Philox(), static_cast<uint32_t*>(words), counters);
  }
#else
  vectorized(Philox(), static_cast<uint32_t*>(words), counters);
#endif
  vectorized(Spread(), static_cast<const uint32_t*>(words), random);
}

void decode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, int64_t n) {
  if (state.dtype == at::kBFloat16) {
    widen(static_cast<const BFloat16*>(state.data) + at, state.dtype, values, n);
  } else if (state.dtype == at::kChar) {
    vectorized(DecodeBlocks<int8_t>(), static_cast<const int8_t*>(state.data) + at,
               static_cast<const float*>(state.scales) + scale, values, n);
  } else {
    vectorized(DecodeBlocks<uint8_t>(), static_cast<const uint8_t*>(state.data) + at,
               static_cast<const float*>(state.scales) + scale, values, n);
  }
}

namespace {

template <typename Code>
void encode_codes(const StateBuffer& state, int64_t at, int64_t scale, float* values, const uint32_t* random, int shift,
                  int64_t n) {
  Code* codes = static_cast<Code*>(state.data) + at;
  if (shift == 0) {
    vectorized(EncodeBlocks<Code, false>(), values, codes, state.scales + scale, random, n);
  } else {
    vectorized(EncodeBlocks<Code, true>(), values, codes, state.scales + scale, random, n);
  }
}

}  // namespace

void encode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, const uint32_t* random, int shift,
                  int64_t n) {
  if (state.dtype == at::kBFloat16) {
    const float* rounded = values;
    vectorized(NarrowStochastically(), rounded, static_cast<BFloat16*>(state.data) + at, random, shift, n);
  } else if (state.dtype == at::kChar) {
    encode_codes<int8_t>(state, at, scale, values, random, shift, n);
  } else {
    encode_codes<uint8_t>(state, at, scale, values, random, shift, n);
  }
}

void decode_remainder(const BFloat16* rounded, const int16_t* remainder, float* values, int64_t n) {
  vectorized(DecodeRemainder(), rounded, remainder, values, n);
}

void encode_remainder(const float* values, BFloat16* rounded, int16_t* remainder, int64_t n) {
  vectorized(EncodeRemainder(), values, rounded, remainder, n);
}

void narrow_stochastically(const float* values, BFloat16* rounded, const uint32_t* random, int64_t n) {
  vectorized(NarrowStochastically(), values, rounded, random, 0, n);
}

}  // namespace apex_npu
