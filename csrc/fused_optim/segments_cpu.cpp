// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "fused_optim/dot.h"
#include "fused_optim/pieces.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

struct AddMultiple {
  template <typename T>
  APEX_NPU_INLINE void operator()(T* x, const T* y, T factor, int64_t n) const {
    for_each<T>(n, [=](int64_t i) APEX_NPU_INLINE_LAMBDA { x[i] += factor * y[i]; }, x, y);
  }
};

void check_same(const char* op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_TYPE(!a.unsafeGetTensorImpl()->is_python_dispatch() && !b.unsafeGetTensorImpl()->is_python_dispatch(), op,
                   ": expected plain tensors, got ", a.toString(), " and ", b.toString());
  TORCH_CHECK_VALUE(a.device().is_cpu() && b.device().is_cpu(), op, ": expected buffers on the cpu, got ", a.toString(),
                    " and ", b.toString());
  TORCH_CHECK_VALUE(a.dim() == 1 && a.is_contiguous() && b.is_contiguous() && a.sizes() == b.sizes(), op,
                    ": segmented buffers must be flat, contiguous and of one length, got shapes ", a.sizes(), " and ",
                    b.sizes(), " with strides ", a.strides(), " and ", b.strides());
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), op, ": segmented buffers must have one dtype, got ",
                   a.scalar_type(), " and ", b.scalar_type());
}

}  // namespace

at::Tensor segment_dot_cpu(const at::Tensor& a, const at::Tensor& b, const at::Tensor& starts,
                           const at::Tensor& lengths) {
  check_same("segment_dot", a, b);
  check_segments("segment_dot", starts, lengths, a.numel());
  const Pieces pieces(starts, lengths);
  std::vector<double> partial(pieces.size()), sums(starts.numel(), 0.0);
  at::Tensor result = at::empty({starts.numel()}, a.options());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "segment_dot", [&] {
    const scalar_t* x = a.const_data_ptr<scalar_t>();
    const scalar_t* y = b.const_data_ptr<scalar_t>();
    pieces.parallel_for_each(
        [&](size_t i) { partial[i] = dot(x + pieces[i].begin, y + pieces[i].begin, pieces[i].numel); });
    for (size_t i = 0; i < pieces.size(); ++i) sums[pieces[i].segment] += partial[i];
    std::copy(sums.begin(), sums.end(), result.mutable_data_ptr<scalar_t>());
  });
  return result;
}

void segment_add_cpu(const at::Tensor& x, const at::Tensor& y, const at::Tensor& factors, const at::Tensor& starts,
                     const at::Tensor& lengths) {
  check_same("segment_add_", x, y);
  check_segments("segment_add_", starts, lengths, x.numel());
  TORCH_CHECK_VALUE(factors.sizes() == starts.sizes() && factors.is_contiguous() && factors.device().is_cpu(),
                    "segment_add_: expected one factor per segment (", starts.numel(), ") on the cpu, got ",
                    factors.numel());
  TORCH_CHECK_TYPE(factors.scalar_type() == x.scalar_type(), "segment_add_: factors must be ", x.scalar_type(),
                   ", got ", factors.scalar_type());
  const Pieces pieces(starts, lengths);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "segment_add_", [&] {
    scalar_t* to = x.mutable_data_ptr<scalar_t>();
    const scalar_t* from = y.const_data_ptr<scalar_t>();
    const scalar_t* factor = factors.const_data_ptr<scalar_t>();
    pieces.parallel_for_each([&](size_t i) {
      const Piece& piece = pieces[i];
      vectorized(AddMultiple(), to + piece.begin, from + piece.begin, factor[piece.segment], piece.numel);
    });
  });
}

}  // namespace apex_npu
