// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Products of matrices.
#include "aclnn.h"

using namespace host_cann;

namespace {

// What is added to a product may be wider than it, such as a bias in float32 beside halves: CANN computes in the type
// to which both are promoted.
template <typename F>
at::Tensor promoted(const Out& out, const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, F function) {
  const auto type = at::result_type(self, a);
  return function(self.to(type), a.to(type), b.to(type)).to(out.dtype());
}

}  // namespace

OP(aclnnMm, (In self, In mat2, Out out, int8_t), out = at::mm(self(), mat2()));
OP(aclnnMatmul, (In self, In mat2, Out out, int8_t), out = at::matmul(self(), mat2()));
OP(aclnnBatchMatMul, (In self, In mat2, Out out, int8_t), out = at::bmm(self(), mat2()));
OP(aclnnMv, (In self, In vec, Out out, int8_t), out = at::mv(self(), vec()));
OP(aclnnDot, (In self, In other, Out out), out = at::dot(self().to(out.dtype()), other().to(out.dtype())));
OP(aclnnAddmm, (In self, In a, In b, Number beta, Number alpha, Out out, int8_t),
   out = promoted(out, self(), a(), b(),
                  [&](auto self, auto a, auto b) { return at::addmm(self, a, b, beta(), alpha()); }));
OP(aclnnInplaceAddmm, (Out self, In a, In b, Number beta, Number alpha, int8_t),
   self = promoted(self, self(), a(), b(),
                   [&](auto self, auto a, auto b) { return at::addmm(self, a, b, beta(), alpha()); }));
OP(aclnnBaddbmm, (In self, In a, In b, Number beta, Number alpha, Out out, int8_t),
   out = promoted(out, self(), a(), b(),
                  [&](auto self, auto a, auto b) { return at::baddbmm(self, a, b, beta(), alpha()); }));
OP(aclnnAddbmm, (In self, In a, In b, Number beta, Number alpha, Out out, int8_t),
   out = promoted(out, self(), a(), b(),
                  [&](auto self, auto a, auto b) { return at::addbmm(self, a, b, beta(), alpha()); }));
OP(aclnnAddmv, (In self, In a, In v, Number alpha, Number beta, Out out, int8_t),
   out = promoted(out, self(), a(), v(),
                  [&](auto self, auto a, auto v) { return at::addmv(self, a, v, beta(), alpha()); }));
OP(aclnnAddr, (In self, In a, In b, Number beta, Number alpha, Out out),
   out = at::addr(self(), a(), b(), beta(), alpha()));
OP_WITH_TEXT(aclnnEinsum, (InList tensors, Text equation, Out out), equation, out = at::einsum(equation, tensors()));
OP(aclnnInplaceAddr, (Out self, In a, In b, Number beta, Number alpha),
   self = at::addr(self(), a(), b(), beta(), alpha()));
