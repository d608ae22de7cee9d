// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sums of products in double, in which no product of two floats overflows or underflows.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace apex_npu {

// Returns sum_i a[i] * b[i]. The order of the additions depends only on n.
double dot(const float* a, const float* b, int64_t n);
double dot(const double* a, const double* b, int64_t n);

// Returns sum_i x[i] * x[i], where `dtype` is float16 or bfloat16; n <= kBlockNumel.
double sum_of_squares(const void* x, c10::ScalarType dtype, int64_t n);

}  // namespace apex_npu
