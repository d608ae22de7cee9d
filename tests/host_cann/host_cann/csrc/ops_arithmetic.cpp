// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Operators of two and three operands: arithmetic, comparisons, logic.
#include <ATen/ScalarOps.h>

#include "aclnn.h"

using namespace host_cann;

#define BINARY(Name, fn)                                                        \
  OP(aclnn##Name, (In self, In other, Out out), out = at::fn(self(), other())); \
  OP(aclnnInplace##Name, (Out self, In other), self = at::fn(self(), other()))
#define BINARY_SCALAR(Name, Names, fn)                                               \
  BINARY(Name, fn);                                                                  \
  OP(aclnn##Names, (In self, Number other, Out out), out = at::fn(self(), other())); \
  OP(aclnnInplace##Names, (Out self, Number other), self = at::fn(self(), other()))
#define SUM(Name, fn)                                                                                         \
  OP(aclnn##Name, (In self, In other, Number alpha, Out out), out = at::fn(self(), other(), alpha()));        \
  OP(aclnn##Name##s, (In self, Number other, Number alpha, Out out), out = at::fn(self(), other(), alpha())); \
  OP(aclnnInplace##Name, (Out self, In other, Number alpha), self = at::fn(self(), other(), alpha()));        \
  OP(aclnnInplace##Name##s, (Out self, Number other, Number alpha), self = at::fn(self(), other(), alpha()))
SUM(Add, add);
SUM(Sub, sub);
OP(aclnnAddV3, (Number self, In other, Number alpha, Out out),
   out = at::add(at::scalar_to_tensor(self()), other(), alpha()));
OP(aclnnInplaceAddV3, (Number self, In other, Number alpha, Out out),
   out = at::add(at::scalar_to_tensor(self()), other(), alpha()));
OP(aclnnRsubs, (In self, Number other, Number alpha, Out out), out = at::rsub(self(), other(), alpha()));
OP(aclnnAddRelu, (In self, In other, Number alpha, Out out), out = at::relu(at::add(self(), other(), alpha())));
BINARY_SCALAR(Mul, Muls, mul);
BINARY_SCALAR(Div, Divs, div);
BINARY_SCALAR(FloorDivide, FloorDivides, floor_divide);
BINARY_SCALAR(FmodTensor, FmodScalar, fmod);
BINARY_SCALAR(RemainderTensorTensor, RemainderTensorScalar, remainder);
BINARY_SCALAR(PowTensorTensor, PowTensorScalar, pow);
BINARY_SCALAR(BitwiseAndTensor, BitwiseAndScalar, bitwise_and);
BINARY_SCALAR(BitwiseOrTensor, BitwiseOrScalar, bitwise_or);
BINARY_SCALAR(BitwiseXorTensor, BitwiseXorScalar, bitwise_xor);
BINARY_SCALAR(EqTensor, EqScalar, eq);
BINARY_SCALAR(NeTensor, NeScalar, ne);
BINARY_SCALAR(GtTensor, GtScalar, gt);
BINARY_SCALAR(GeTensor, GeScalar, ge);
BINARY_SCALAR(LtTensor, LtScalar, lt);
BINARY_SCALAR(LeTensor, LeScalar, le);
BINARY(LogicalAnd, logical_and);
BINARY(LogicalOr, logical_or);
BINARY(LogicalXor, logical_xor);
BINARY(Atan2, atan2);
BINARY(Maximum, maximum);
BINARY(Minimum, minimum);
OP(aclnnRightShift, (In self, In other, Out out), out = at::bitwise_right_shift(self(), other()));
OP(aclnnLeftShift, (In self, In other, Out out), out = at::bitwise_left_shift(self(), other()));
OP(aclnnLeftShifts, (In self, Number other, Out out), out = at::bitwise_left_shift(self(), other()));
OP(aclnnPowScalarTensor, (Number self, In exponent, Out out), out = at::pow(self(), exponent()));
OP(aclnnRemainderScalarTensor, (Number self, In other, Out out), out = at::remainder(self(), other()));

static std::optional<c10::string_view> rounding(int mode) {
  if (mode == 1) return "trunc";
  if (mode == 2) return "floor";
  return std::nullopt;
}
OP(aclnnDivMod, (In self, In other, int mode, Out out), out = at::div(self(), other(), rounding(mode)));
OP(aclnnDivMods, (In self, Number other, int mode, Out out), out = at::div(self(), other(), rounding(mode)));
OP(aclnnInplaceDivMod, (Out self, In other, int mode), self = at::div(self(), other(), rounding(mode)));
OP(aclnnInplaceDivMods, (Out self, Number other, int mode), self = at::div(self(), other(), rounding(mode)));
OP(aclnnEqual, (In self, In other, Out out),
   out = at::scalar_tensor(at::equal(self(), other()), out().options()).expand(out().sizes()));
OP(aclnnIsClose, (In a, In b, double rtol, double atol, bool nan, Out out),
   out = at::isclose(a(), b(), rtol, atol, nan));
OP(aclnnXLogYTensor, (In self, In other, Out out), out = at::xlogy(self(), other()));
OP(aclnnLogAddExp, (In self, In other, Out out), out = at::logaddexp(self(), other()));

// ---- three operands ----
#define TERNARY(Name, fn)                                                                                 \
  OP(aclnn##Name, (In self, In a, In b, Number value, Out out), out = at::fn(self(), a(), b(), value())); \
  OP(aclnnInplace##Name, (Out self, In a, In b, Number value), self = at::fn(self(), a(), b(), value()))
TERNARY(Addcmul, addcmul);
TERNARY(Addcdiv, addcdiv);
OP(aclnnLerp, (In self, In end, In weight, Out out), out = at::lerp(self(), end(), weight()));
OP(aclnnLerps, (In self, In end, Number weight, Out out), out = at::lerp(self(), end(), weight()));
OP(aclnnInplaceLerp, (Out self, In end, In weight), self = at::lerp(self(), end(), weight()));
OP(aclnnInplaceLerps, (Out self, In end, Number weight), self = at::lerp(self(), end(), weight()));
OP(aclnnSWhere, (In condition, In self, In other, Out out), out = at::where(condition(), self(), other()));
OP(aclnnClamp, (In self, Number lo, Number hi, Out out), out = at::clamp(self(), lo.maybe(), hi.maybe()));
OP(aclnnClampTensor, (In self, In lo, In hi, Out out), out = at::clamp(self(), lo.maybe(), hi.maybe()));
OP(aclnnClampMin, (In self, Number lo, Out out), out = at::clamp_min(self(), lo()));
OP(aclnnClampMax, (In self, Number hi, Out out), out = at::clamp_max(self(), hi()));
OP(aclnnClampMinTensor, (In self, In lo, Out out), out = at::clamp_min(self(), lo()));
OP(aclnnClampMaxTensor, (In self, In hi, Out out), out = at::clamp_max(self(), hi()));
OP(aclnnInplaceClampMax, (Out self, Number hi), self = at::clamp_max(self(), hi()));
OP(aclnnInplaceClampMinTensor, (Out self, In lo), self = at::clamp_min(self(), lo()));
OP(aclnnInplaceClampMaxTensor, (Out self, In hi), self = at::clamp_max(self(), hi()));
