// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Copies, casts, fills, and operators that only move elements.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnInplaceCopy, (Out self, In src), self = src().expand(self().sizes()));
OP(aclnnCast, (In self, Type, Out out), out = self);
OP(aclnnInplaceZero, (Out self), self = at::zeros_like(self()));
OP(aclnnInplaceOne, (Out self), self = at::ones_like(self()));
OP(aclnnInplaceFillScalar, (Out self, Number value), self = at::full_like(self(), value()));
OP(aclnnInplaceFillTensor, (Out self, In value), self = value().reshape({}).expand(self().sizes()));
OP(aclnnInplaceFillDiagonal, (Out self, Number value, bool wrap), self = self().clone().fill_diagonal_(value(), wrap));
OP(aclnnArange, (Number start, Number end, Number step, Out out),
   out = at::arange(start(), end(), step(), out().options()));
OP(aclnnRange, (Number start, Number end, Number step, Out out),
   out = at::range(start(), end(), step(), out().options()));
OP(aclnnLinspace, (Number start, Number end, int64_t steps, Out out),
   out = at::linspace(start(), end(), steps, out().options()));
OP(aclnnEye, (int64_t n, int64_t m, Out out), out = at::eye(n, m, out().options()));
OP(aclnnCat, (InList tensors, int64_t dim, Out out), out = at::cat(tensors(), dim));
OP(aclnnStack, (InList tensors, int64_t dim, Out out), out = at::stack(tensors(), dim));
OP(aclnnSplitWithSize, (In self, Ints sizes, int64_t dim, OutList out), {
  auto parts = self().split_with_sizes(sizes(), dim);
  for (size_t i = 0; i < parts.size(); ++i) out.set(i, parts[i]);
});
OP(aclnnRepeat, (In self, Ints repeats, Out out), out = self().repeat(repeats()));
OP(aclnnFlip, (In self, Ints dims, Out out), out = self().flip(dims()));
OP(aclnnRoll, (In self, Ints shifts, Ints dims, Out out), out = at::roll(self, shifts(), dims()));
OP(aclnnPermute, (In self, Ints dims, Out out), out = self().permute(dims()));
OP(aclnnTril, (In self, int64_t k, Out out), out = at::tril(self, k));
OP(aclnnTriu, (In self, int64_t k, Out out), out = at::triu(self, k));
OP(aclnnInplaceTril, (Out self, int64_t k), self = at::tril(self, k));
OP(aclnnInplaceTriu, (Out self, int64_t k), self = at::triu(self, k));
OP(aclnnConstantPadNd, (In self, Ints pad, Number value, Out out), out = at::constant_pad_nd(self, pad(), value()));
OP(aclnnReflectionPad1d, (In self, Ints pad, Out out), out = at::reflection_pad1d(self, pad()));
OP(aclnnReflectionPad2d, (In self, Ints pad, Out out), out = at::reflection_pad2d(self, pad()));
OP(aclnnReplicationPad2d, (In self, Ints pad, Out out), out = at::replication_pad2d(self, pad()));
OP(aclnnOneHot, (In self, int classes, In on, In off, int64_t axis, Out out), {
  TORCH_CHECK(axis == -1, "one-hot along another dimension");
  out = at::where(at::one_hot(self().to(at::kLong), classes).to(at::kBool), on(), off());
});
