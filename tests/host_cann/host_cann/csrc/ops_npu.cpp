// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Operators that torch has no function for: those of torch_npu's own.
#include "aclnn.h"

using namespace host_cann;

static at::Tensor wide(const at::Tensor& x) { return x.to(at::kFloat); }

// x * sigmoid(1.702 x), and its derivative
OP(aclnnFastGelu, (In self, Out out), out = wide(self()) * (wide(self()) * 1.702).sigmoid());
OP(aclnnFastGeluBackward, (In grad, In self, Out out), {
  const at::Tensor x = wide(self()), s = (x * 1.702).sigmoid();
  out = wide(grad()) * (s + x * 1.702 * s * (1 - s));
});

OP(aclnnRmsNorm, (In x, In gamma, double eps, Out y, Out rstd), {
  const at::Tensor r = (wide(x()).pow(2).mean(-1, true) + eps).rsqrt();
  y = wide(x()) * r * wide(gamma());
  rstd = r.reshape(rstd().sizes());
});
OP(aclnnRmsNormGrad, (In dy, In x, In rstd, In gamma, Out dx, Out dgamma), {
  const at::Tensor g = wide(dy()), normal = wide(x()) * wide(rstd()), scaled = g * wide(gamma());
  dx = wide(rstd()) * (scaled - normal * (scaled * normal).mean(-1, true));
  dgamma = (g * normal).reshape({-1, gamma().size(0)}).sum(0);
});

// silu of the first half, times the second
OP(aclnnSwiGlu, (In x, int64_t dim, Out out), {
  const auto halves = wide(x()).chunk(2, dim);
  out = at::silu(halves[0]) * halves[1];
});
OP(aclnnSwiGluGrad, (In grad, In x, int64_t dim, Out out), {
  const auto halves = wide(x()).chunk(2, dim);
  const at::Tensor g = wide(grad());
  out = at::cat({at::silu_backward(g * halves[1], halves[0]), g * at::silu(halves[0])}, dim);
});

// Rotary embedding: x * cos + rotated(x) * sin. Mode 0 pairs an element with the one half of the width away, mode 1
// with its neighbour.
static at::Tensor rotated(const at::Tensor& x, int64_t mode) {
  TORCH_CHECK(mode == 0 || mode == 1, "rotary embedding of mode ", mode);
  if (mode == 0) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const at::Tensor pairs = x.unflatten(-1, {x.size(-1) / 2, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}
static at::Tensor rotated_back(const at::Tensor& x, int64_t mode) { return -rotated(x, mode); }
OP(aclnnRotaryPositionEmbedding, (In x, In cos, In sin, int64_t mode, Out out),
   out = wide(x()) * wide(cos()) + rotated(wide(x()), mode) * wide(sin()));
OP(aclnnRotaryPositionEmbeddingGrad, (In grad, In cos, In sin, In x, int64_t mode, Out dx, Out dcos, Out dsin), {
  const at::Tensor g = wide(grad());
  dx = g * wide(cos()) + rotated_back(g * wide(sin()), mode);
  if (x.p && dcos.p) dcos = (g * wide(x())).sum_to_size(dcos().sizes());
  if (x.p && dsin.p) dsin = (g * rotated(wide(x()), mode)).sum_to_size(dsin().sizes());
});

// softmax(x * scale) where the mask is 0
OP(aclnnScaledMaskedSoftmax, (In x, In mask, double scale, bool triangular, Out out), {
  TORCH_CHECK(!triangular, "a mask that is always triangular");
  out = at::softmax((wide(x()) * scale).masked_fill(mask().to(at::kBool), -10000.0), -1);
});
OP(aclnnScaledMaskedSoftmaxBackward, (In grad, In y, In mask, double scale, bool triangular, Out out), {
  TORCH_CHECK(!triangular, "a mask that is always triangular");
  const at::Tensor dx = at::_softmax_backward_data(wide(grad()), wide(y()), -1, at::kFloat);
  out = (dx * scale).masked_fill(mask().to(at::kBool), 0);
});
