// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/state_codec.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

struct FillRandom {
  APEX_NPU_INLINE void operator()(uint32_t* random, uint64_t counter, uint32_t position, uint32_t count,
                                  uint32_t pair) const {
    uint32_t c[4][kCounters];
#pragma omp simd
    for (int j = 0; j < kCounters; ++j) {
      c[0][j] = static_cast<uint32_t>(counter) + static_cast<uint32_t>(j);
      c[1][j] = static_cast<uint32_t>(counter >> 32) << 8 | pair;
      c[2][j] = count;
      c[3][j] = position;
    }
    uint32_t key0 = kKey0, key1 = kKey1;
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
      for (int j = 0; j < kCounters; ++j) {
        const uint64_t a = static_cast<uint64_t>(c[0][j]) * 0xd2511f53u,
                       b = static_cast<uint64_t>(c[2][j]) * 0xcd9e8d57u;
        c[0][j] = static_cast<uint32_t>(b >> 32) ^ c[1][j] ^ key0;
        c[1][j] = static_cast<uint32_t>(b);
        c[2][j] = static_cast<uint32_t>(a >> 32) ^ c[3][j] ^ key1;
        c[3][j] = static_cast<uint32_t>(a);
      }
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
    for (int j = 0; j < kCounters; ++j) {
      for (int word = 0; word < 4; ++word) {
        uint32_t* group = random + (4 * j + word) * kGroup;
        const uint32_t first = c[word][j];
#pragma omp simd
        for (int k = 0; k < kGroup; ++k) group[k] = first + kWeyl * static_cast<uint32_t>(k);
      }
    }
  }
};

// 12 of an element's 16 random bits as a number in (0, 1): never so near to 0 or 1 that a value that is a code, but for
// the rounding of float32, becomes another.
APEX_NPU_INLINE float centred(uint32_t random, int shift) {
  const auto bits = static_cast<int32_t>(((random >> shift) & 0xffffu) >> 4);
  return (static_cast<float>(bits) + 0.5f) * 0x1p-12f;
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

template <typename Code>
struct EncodeBlocks {
  APEX_NPU_INLINE void operator()(const float* values, Code* codes, float* scales, const uint32_t* random, int shift,
                                  int64_t n) const {
    for (int64_t begin = 0; begin < n; begin += kScaleNumel) {
      const int64_t end = std::min(n, begin + kScaleNumel);
      int32_t largest = 0;  // of the bits of magnitudes: so inf and nan are larger than numbers
#pragma omp simd reduction(max : largest)
      for (int64_t i = begin; i < end; ++i) {
        const auto magnitude = static_cast<int32_t>(bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
        largest = largest > magnitude ? largest : magnitude;
      }
      float scale = bit_cast<float>(largest);
      const bool finite = largest < static_cast<int32_t>(kFloatInf);
      if (!finite || scale < 0x1p-90f) {
        scales[begin / kScaleNumel] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        std::fill(codes + begin, codes + end, Code(0));
        continue;
      }
      scales[begin / kScaleNumel] = scale;
      const float down = scale > 0x1p125f ? 0x1p-4f : 1.0f;  // else the reciprocal would be denormal
      const float inverse = 1.0f / (scale * down);
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const float ratio = values[i] * down * inverse, u = centred(random[i], shift);
        if constexpr (std::is_signed_v<Code>) {
          // Above 127 and 255 by the rounding of float32 alone, which u leaves room for.
          codes[i] = static_cast<Code>(static_cast<int32_t>(ratio * 127.0f + 128.0f + u) - 128);
        } else {
          const float t = std::sqrt(ratio > 0.0f ? ratio : 0.0f) * 255.0f;
          const int32_t least = values[i] > 0.0f ? 1 : 0;  // only a 0 becomes 0: it is divided by
          const auto code = static_cast<int32_t>(t + u);
          codes[i] = static_cast<Code>(code < least ? least : code);
        }
      }
    }
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
  vectorized(FillRandom(), random, static_cast<uint64_t>(first / (4 * kGroup)), position, count, pair);
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

void encode_state(const StateBuffer& state, int64_t at, int64_t scale, const float* values, const uint32_t* random,
                  int shift, int64_t n) {
  if (state.dtype == at::kBFloat16) {
    vectorized(NarrowStochastically(), values, static_cast<BFloat16*>(state.data) + at, random, shift, n);
  } else if (state.dtype == at::kChar) {
    vectorized(EncodeBlocks<int8_t>(), values, static_cast<int8_t*>(state.data) + at, state.scales + scale, random,
               shift, n);
  } else {
    vectorized(EncodeBlocks<uint8_t>(), values, static_cast<uint8_t*>(state.data) + at, state.scales + scale, random,
               shift, n);
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
