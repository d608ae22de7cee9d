// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/segments_cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace apex_npu {
namespace {

// Independent partial sums, so that the compiler can keep several additions in flight.
constexpr int64_t kLanes = 8;
// Elements worth a thread of their own.
constexpr int64_t kGrainNumel = 1 << 15;

template <typename T>
double dot(const T* a, const T* b, int64_t n) {
  double lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(a[j + k]) * static_cast<double>(b[j + k]);
  }
  for (; j < n; ++j) lanes[0] += static_cast<double>(a[j]) * static_cast<double>(b[j]);
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

void check_segments(const at::Tensor& flat, const at::Tensor& starts, const at::Tensor& lengths) {
  TORCH_CHECK_VALUE(flat.dim() == 1 && flat.is_contiguous(), "a segmented buffer must be flat and contiguous");
  TORCH_CHECK_TYPE(starts.scalar_type() == at::kLong && lengths.scalar_type() == at::kLong,
                   "starts and lengths must be int64");
  TORCH_CHECK_VALUE(starts.numel() == lengths.numel(), "starts and lengths must have one length, got ", starts.numel(),
                    " and ", lengths.numel());
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < starts.numel(); ++i) {
    TORCH_CHECK_VALUE(start[i] >= 0 && length[i] >= 0 && length[i] <= flat.numel() - start[i], "segment ", i, " [",
                      start[i], ", ", start[i] + length[i], ") is outside the buffer of ", flat.numel(), " elements");
  }
}

void check_same(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.sizes() == b.sizes() && b.is_contiguous(), "segmented buffers must be flat and of one length");
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "segmented buffers must have one dtype, got ", a.scalar_type(),
                   " and ", b.scalar_type());
}

// Segments are shared out whole; about as many per thread as hold kGrainNumel elements.
int64_t segments_per_thread(const at::Tensor& flat, int64_t count) {
  return std::max<int64_t>(1, kGrainNumel * count / std::max<int64_t>(1, flat.numel()));
}

}  // namespace

at::Tensor segment_dot_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts,
                           const at::Tensor& lengths) {
  check_segments(a, starts, lengths);
  check_same(a, b);
  const int64_t count = starts.numel();
  at::Tensor sums = at::empty({count}, a.options());
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "segment_dot", [&] {
    const scalar_t* x = a.const_data_ptr<scalar_t>();
    const scalar_t* y = b.const_data_ptr<scalar_t>();
    scalar_t* sum = sums.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, count, segments_per_thread(a, count), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) sum[i] = dot(x + start[i], y + start[i], length[i]);
    });
  });
  return sums;
}

void segment_add_cpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& factors, const at::Tensor& starts,
                     const at::Tensor& lengths) {
  check_segments(x, starts, lengths);
  check_same(x, y);
  TORCH_CHECK_VALUE(factors.sizes() == starts.sizes() && factors.is_contiguous(), "one factor per segment, got ",
                    factors.numel(), " for ", starts.numel());
  TORCH_CHECK_TYPE(factors.scalar_type() == x.scalar_type(), "factors must be ", x.scalar_type(), ", got ",
                   factors.scalar_type());
  const int64_t count = starts.numel();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "segment_add", [&] {
    scalar_t* to = x.mutable_data_ptr<scalar_t>();
    const scalar_t* from = y.const_data_ptr<scalar_t>();
    const scalar_t* factor = factors.const_data_ptr<scalar_t>();
    at::parallel_for(0, count, segments_per_thread(x, count), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t j = start[i]; j < start[i] + length[i]; ++j) to[j] += factor[i] * from[j];
      }
    });
  });
}

}  // namespace apex_npu
