// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

#include "fused_optim/dot.h"
#include "fused_optim/grad_list.h"
#include "fused_optim/operands.h"
#include "fused_optim/pieces.h"

namespace apex_npu {
namespace {

double squared_norm(const char* x, at::ScalarType dtype, int64_t begin, int64_t n) {
  if (dtype == at::kDouble) {
    const double* values = reinterpret_cast<const double*>(x) + begin;
    return dot(values, values, n);
  }
  if (dtype == at::kFloat) {
    const float* values = reinterpret_cast<const float*>(x) + begin;
    return dot(values, values, n);
  }
  const auto* values = reinterpret_cast<const uint16_t*>(x) + begin;
  double sum = 0;
  for (int64_t done = 0; done < n; done += kBlockNumel) {
    sum += sum_of_squares(values + done, dtype, std::min(kBlockNumel, n - done));
  }
  return sum;
}

}  // namespace

at::Tensor norm_cpu(const at::Tensor& x) {
  TORCH_CHECK_TYPE(is_float(x.scalar_type()), "norm: x must be float16, bfloat16, float32 or float64, got ",
                   x.scalar_type());
  const GradList* list = grad_list_of(x);
  // A FakeTensor has no memory.
  TORCH_CHECK_VALUE(list != nullptr || (x.layout() == c10::kStrided && x.device().is_cpu() && x.is_contiguous() &&
                                        !x.unsafeGetTensorImpl()->is_python_dispatch()),
                    "norm: x must be a plain contiguous tensor on the cpu, got ", x.toString(), " of shape ", x.sizes(),
                    " with strides ", x.strides());
  const ListedGrad whole = {0, x.numel(), list == nullptr ? static_cast<const char*>(x.const_data_ptr()) : nullptr,
                            x.scalar_type()};
  const ListedGrad* places = list == nullptr ? &whole : list->places().data();
  const size_t count = list == nullptr ? 1 : list->places().size();
  Pieces pieces;
  for (size_t i = 0; i < count; ++i) {
    pieces.add_segment(static_cast<int64_t>(i), 0, places[i].end - places[i].begin);
  }
  std::vector<double> sums(pieces.size());
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    const ListedGrad& place = places[piece.segment];
    if (list != nullptr) list->prefetch_behind(piece.segment);
    sums[i] = squared_norm(place.data, place.dtype, piece.begin, piece.numel);
  });
  double total = 0;
  for (double sum : sums) total += sum;
  const bool is_double = x.scalar_type() == at::kDouble;
  at::Tensor norm = at::empty({}, at::TensorOptions(is_double ? at::kDouble : at::kFloat));
  if (is_double) {
    *norm.mutable_data_ptr<double>() = std::sqrt(total);
  } else {
    *norm.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(total));
  }
  return norm;
}

}  // namespace apex_npu
