// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sums of products, in double: no product of two floats overflows or vanishes there.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace apex_npu {

// sum_i a[i] * b[i]; the order of the additions depends on n alone.
double dot(const float* a, const float* b, int64_t n);
double dot(const double* a, const double* b, int64_t n);

// The same of x with itself, where `dtype` is float16 or bfloat16; n <= kBlockNumel.
double sum_of_squares(const uint16_t* x, c10::ScalarType dtype, int64_t n);

}  // namespace apex_npu
