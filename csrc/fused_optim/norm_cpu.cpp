// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/norm_cpu.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "fused_optim/convert.h"
#include "fused_optim/dot.h"
#include "fused_optim/operands.h"
#include "fused_optim/pieces.h"

namespace apex_npu {
namespace {

double squared_norm(const at::Tensor& x, int64_t begin, int64_t n) {
  if (x.scalar_type() == at::kDouble) {
    const double* values = x.const_data_ptr<double>() + begin;
    return dot(values, values, n);
  }
  if (x.scalar_type() == at::kFloat) {
    const float* values = x.const_data_ptr<float>() + begin;
    return dot(values, values, n);
  }
  const auto* values = static_cast<const uint16_t*>(x.const_data_ptr()) + begin;
  double sum = 0;
  alignas(64) float wide[kBlockNumel];
  for (int64_t done = 0; done < n; done += kBlockNumel) {
    const int64_t part = std::min(kBlockNumel, n - done);
    widen(values + done, x.scalar_type(), wide, part);
    sum += dot(wide, wide, part);
  }
  return sum;
}

}  // namespace

at::Tensor norm_cpu(const at::Tensor& x) {
  TORCH_CHECK_TYPE(is_float(x.scalar_type()), "norm: x must be float16, bfloat16, float32 or float64, got ",
                   x.scalar_type());
  TORCH_CHECK_VALUE(x.layout() == c10::kStrided && x.device().is_cpu() && x.is_contiguous(),
                    "norm: x must be contiguous and on the cpu, got ", x.toString(), " of shape ", x.sizes(),
                    " with strides ", x.strides());
  Pieces pieces;
  pieces.add_segment(0, 0, x.numel());
  std::vector<double> sums(pieces.size());
  pieces.parallel_for_each([&](size_t i) { sums[i] = squared_norm(x, pieces[i].begin, pieces[i].numel); });
  double total = 0;
  for (double sum : sums) total += sum;
  const bool is_double = x.scalar_type() == at::kDouble;
  at::Tensor norm = at::empty({}, x.options().dtype(is_double ? at::kDouble : at::kFloat));
  if (is_double) {
    *norm.mutable_data_ptr<double>() = std::sqrt(total);
  } else {
    *norm.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(total));
  }
  return norm;
}

}  // namespace apex_npu
