// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Converts arrays of float16 and bfloat16 to float32 and back. Rounds to nearest, ties to even; subnormal numbers, inf
// and nan are kept.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fused_optim/vectors.h"

namespace apex_npu {

// std::bit_cast of C++20.
template <typename To, typename From>
APEX_NPU_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

constexpr uint32_t kFloatInf = 0x7f800000u;

// Returns `a` if `condition`, else `b`. In a large loop a compiler may turn ?: into a branch, and not vectorise it.
template <typename T>
APEX_NPU_INLINE T select(bool condition, T a, T b) {
  using Bits = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint64_t>;
  const Bits mask = Bits(0) - static_cast<Bits>(condition);
  return bit_cast<T>((bit_cast<Bits>(a) & mask) | (bit_cast<Bits>(b) & ~mask));
}

// Returns all bits set if `condition`, else 0.
APEX_NPU_INLINE uint32_t mask_of(bool condition) { return 0u - static_cast<uint32_t>(condition); }

// c10::BFloat16 has constructors and operators that are not inlined in every loop.
struct BFloat16 {
  uint16_t bits;

  APEX_NPU_INLINE operator float() const { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

  APEX_NPU_INLINE void operator=(float value) {
    const uint32_t wide = bit_cast<uint32_t>(value), upper = wide >> 16;
    const uint32_t rounded = (wide + 0x7fffu + (upper & 1u)) >> 16;
    bits = static_cast<uint16_t>(value != value ? upper | 0x0040u : rounded);  // nan: a quiet one
  }
};

// float16 has 5 bits of exponent and 10 of mantissa, float32 8 and 23: 13 more bits, and a bias larger by 112.
constexpr uint32_t kBias = 112u << 23;

// Without branches, and without subnormal float32 numbers, which a processor may flush to zero.
struct Half {
  uint16_t bits;

  APEX_NPU_INLINE operator float() const {
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + kBias + (magnitude >= 0x7c00u ? kBias : 0u);
    const uint32_t subnormal = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t sign = (bits & 0x8000u) << 16;
    return bit_cast<float>((magnitude < 0x0400u ? subnormal : normal) | sign);
  }

  APEX_NPU_INLINE void operator=(float value) {
    const auto wide = bit_cast<uint32_t>(value);
    const auto magnitude = static_cast<int32_t>(wide & 0x7fffffffu);  // signed, as vectors compare them
    const auto rounded = (magnitude - static_cast<int32_t>(kBias) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // The last bit of 0.5 equals that of float16's subnormal numbers, so that this addition rounds to it.
    const auto subnormal = bit_cast<int32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<int32_t>(0.5f);
    int32_t half = magnitude < 0x38800000 ? subnormal : rounded;  // below 2^-14
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;               // 65520 and more round to inf
    half = value != value ? 0x7e00 : half;
    bits = static_cast<uint16_t>(static_cast<uint32_t>(half) | ((wide >> 16) & 0x8000u));
  }
};

// Copies elements between formats.
struct Copy {
  template <typename From, typename To>
  APEX_NPU_INLINE void operator()(From from, To to, int64_t n) const {
    for_each<float>(n, [=](Element i) APEX_NPU_INLINE_LAMBDA { to[i] = static_cast<float>(from[i]); }, from, to);
  }
};

// Computes dst[i] = src[i]; `dtype`, of src, is float16 or bfloat16.
void widen(const void* src, c10::ScalarType dtype, float* dst, int64_t n);

// Computes dst[i] = src[i], rounded; `dtype`, of dst, is float16 or bfloat16.
void narrow(const float* src, void* dst, c10::ScalarType dtype, int64_t n);

}  // namespace apex_npu
