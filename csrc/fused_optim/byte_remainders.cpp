// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Remainders of 8 bits. apex_npu/ops/state_codec.py defines them; this file computes the same bits.
#include <algorithm>

#include "fused_optim/state_codec.h"

namespace apex_npu {
namespace {

// For bfloat16, `join` and `split` with the upper 8 bits of remainders.
struct JoinBytes {
  APEX_NPU_INLINE void operator()(const BFloat16* param, const int8_t* stored, float* values, int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) values[i] = join(param[i], static_cast<int16_t>(stored[i] * 256));
  }
};

// Stores n <= kBlockNumel elements by Element::store, which gets 8 random bits for each.
template <typename Element>
struct StoreEach {
  template <typename From, typename Param>
  APEX_NPU_INLINE void operator()(const From* from, Param* param, int8_t* stored, const uint32_t* words,
                                  int64_t n) const {
    alignas(64) uint32_t random[kBlockNumel];  // first, because the loop below has vectors of another length
    for (int64_t group = 0; group < kBlockNumel / kGroup; ++group) {
#pragma omp simd
      for (uint32_t i = 0; i < kGroup; ++i) random[group * kGroup + i] = words[group] + kWeyl * i;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) stored[i] = Element::store(from[i], param + i, random[i] >> 24);
  }
};

struct SplitByte {
  static APEX_NPU_INLINE int8_t store(float value, BFloat16* param, uint32_t random) {
    const uint32_t nan = mask_of(value != value);
    const uint32_t kept = (bit_cast<uint32_t>(value) | (nan & 0x00400000u)) & ~(nan & 0xffffu);
    const uint32_t rounded = (kept + random) >> 8;  // in 24 bits; a carry may move the parameter
    param->bits = static_cast<uint16_t>((rounded + 0x80u) >> 8);
    return static_cast<int8_t>(rounded);
  }
};

// For float16, the conversion between remainders of 16 and of 8 bits.
struct WidenRemainders {
  // Clamps to the remainders that `carried` returns. `join` would clamp to a number between them.
  APEX_NPU_INLINE void operator()(const Half* param, const int8_t* stored, int16_t* remainder, int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const int32_t largest = 64 - (param[i].bits & 1);
      remainder[i] = static_cast<int16_t>(std::min(std::max<int32_t>(stored[i], -largest), largest) * 256);
    }
  }
};

struct NarrowRemainder {
  static APEX_NPU_INLINE int8_t store(int16_t remainder, Half* param, uint32_t random) {
    return carried((remainder + static_cast<int32_t>(random)) >> 8, param);
  }

  // Returns a rounded remainder, from -64 to 64. Ties belong to the even neighbour, and move the parameter there. The
  // next power of two has units of twice the size.
  static APEX_NPU_INLINE int8_t carried(int32_t rounded, Half* param) {
    const auto bits = static_cast<int32_t>(param->bits);
    const int32_t tie = -static_cast<int32_t>(rounded == 64 || rounded == -64) & -(bits & 1);  // -1 if it moves
    const int32_t inward = (rounded ^ -(bits >> 15)) >> 31;                                    // -1 if toward zero
    const int32_t moved = bits + (tie & (1 | inward)), magnitude = moved & 0x7fff;
    const auto is_power = static_cast<int32_t>((magnitude & 0x3ff) == 0 && magnitude > 0x400);
    const int32_t kept = ((rounded ^ tie) - tie) >> (is_power & tie & ~inward);
    param->bits = static_cast<uint16_t>(moved);
    return static_cast<int8_t>(kept & -static_cast<int32_t>(magnitude < 0x7c00));
  }
};

}  // namespace

void decode_remainder(void* param, at::ScalarType dtype, const int8_t* remainder, float* values, int64_t n) {
  if (dtype != at::kHalf) {
    vectorized_wide(JoinBytes(), static_cast<const BFloat16*>(param), remainder, values, n);
    return;
  }
  alignas(64) int16_t wide[kBlockNumel];
  vectorized_wide(WidenRemainders(), static_cast<const Half*>(param), remainder, static_cast<int16_t*>(wide), n);
  decode_remainder(param, dtype, wide, values, n);
}

void encode_remainder(const float* values, void* param, at::ScalarType dtype, int8_t* remainder,
                      const RandomWords& random, int64_t n) {
  const uint32_t* words = random.words;
  if (dtype != at::kHalf) {
    vectorized_wide(StoreEach<SplitByte>(), values, static_cast<BFloat16*>(param), remainder, words, n);
    return;
  }
  alignas(64) int16_t wide[kBlockNumel];
  encode_remainder(values, param, dtype, wide, n);
  vectorized_wide(StoreEach<NarrowRemainder>(), static_cast<const int16_t*>(wide), static_cast<Half*>(param), remainder,
                  words, n);
}

}  // namespace apex_npu
