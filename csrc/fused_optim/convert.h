// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// float16 and bfloat16 to float32 and back, many at a time. Rounded to nearest, ties to even; subnormal numbers, inf
// and nan are kept.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstring>

#include "fused_optim/vectors.h"

namespace apex_npu {

// std::bit_cast, which is C++20's.
template <typename To, typename From>
APEX_NPU_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

constexpr uint32_t kFloatInf = 0x7f800000u;

// c10's has constructors and operators, which are not inlined wherever a loop is.
struct BFloat16 {
  uint16_t bits;
};

APEX_NPU_INLINE float to_float(BFloat16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

APEX_NPU_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value), upper = bits >> 16;
  const uint32_t rounded = (bits + 0x7fffu + (upper & 1u)) >> 16;
  return {static_cast<uint16_t>(value != value ? upper | 0x0040u : rounded)};  // nan: a quiet one
}

// dst[i] = src[i]; `dtype`, of src, is float16 or bfloat16.
void widen(const void* src, c10::ScalarType dtype, float* dst, int64_t n);

// dst[i] = src[i], rounded; `dtype`, of dst, is float16 or bfloat16.
void narrow(const float* src, void* dst, c10::ScalarType dtype, int64_t n);

}  // namespace apex_npu
