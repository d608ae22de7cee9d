// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sums and updates over segments of flat buffers, for rules that depend on whole parameters or rows. `starts` and
// `lengths` (int64, host) are the segments' ranges; elements outside of all segments do not change. Segments that are
// not ranges of memory (`ids`) are not supported here.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace apex_npu {

// Returns sum_j a[j] * b[j] over each segment, accumulated in double, in a's dtype.
at::Tensor segment_dot_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts,
                           const at::Tensor& lengths);

// Computes x[j] += factors[i] * y[j] for every element j of every segment i. x and y may be the same tensor.
void segment_add_cpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& factors, const at::Tensor& starts,
                     const at::Tensor& lengths);

}  // namespace apex_npu
