// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// float16 and bfloat16 to float32 and back, many at a time. Rounded to nearest, ties to even; subnormal numbers, inf
// and nan are kept.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace apex_npu {

// dst[i] = src[i]; `dtype`, of src, is float16 or bfloat16.
void widen(const void* src, c10::ScalarType dtype, float* dst, int64_t n);

// dst[i] = src[i], rounded; `dtype`, of dst, is float16 or bfloat16.
void narrow(const float* src, void* dst, c10::ScalarType dtype, int64_t n);

}  // namespace apex_npu
