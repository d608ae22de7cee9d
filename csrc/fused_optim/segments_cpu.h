// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Sums and updates over segments of flat buffers, for the rules that work on one parameter, or one row of it, at a
// time. `starts` and `lengths` (int64, host) are the segments' ranges; elements outside all of them are unchanged.
// Segments that are no ranges of memory (`ids`) are not supported here.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace apex_npu {

// sum_j a[j] * b[j] over each segment, accumulated in double; of a's dtype.
at::Tensor segment_dot_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts,
                           const at::Tensor& lengths, const std::optional<at::Tensor>& ids);

// x[j] += factors[i] * y[j] for every element j of every segment i. x and y may be the same tensor.
void segment_add_cpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& factors, const at::Tensor& starts,
                     const at::Tensor& lengths, const std::optional<at::Tensor>& ids);

}  // namespace apex_npu
