// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Functions of one operand.
#include "aclnn.h"

using namespace host_cann;

#define UNARY(Name, fn) OP(aclnn##Name, (In self, Out out), out = at::fn(self()))
#define UNARY_(Name, fn) \
  UNARY(Name, fn);       \
  OP(aclnnInplace##Name, (Out self), self = at::fn(self()))
UNARY(Abs, abs);
UNARY(Sign, sign);
UNARY(Square, square);
UNARY(IsFinite, isfinite);
UNARY(IsPosInf, isposinf);
UNARY(IsNegInf, isneginf);
UNARY(BitwiseNot, bitwise_not);
UNARY(Signbit, signbit);
UNARY_(LogicalNot, logical_not);
UNARY_(Sqrt, sqrt);
UNARY_(Rsqrt, rsqrt);
UNARY_(Neg, neg);
UNARY_(Exp, exp);
UNARY_(Exp2, exp2);
UNARY_(Expm1, expm1);
UNARY_(Log, log);
UNARY_(Log2, log2);
UNARY_(Log10, log10);
UNARY_(Log1p, log1p);
UNARY_(Reciprocal, reciprocal);
UNARY_(Relu, relu);
UNARY_(Tanh, tanh);
UNARY_(Sigmoid, sigmoid);
UNARY_(Sin, sin);
UNARY_(Cos, cos);
UNARY_(Tan, tan);
UNARY_(Asin, asin);
UNARY_(Acos, acos);
UNARY_(Atan, atan);
UNARY_(Sinh, sinh);
UNARY_(Cosh, cosh);
UNARY_(Asinh, asinh);
UNARY_(Acosh, acosh);
UNARY_(Atanh, atanh);
UNARY_(Floor, floor);
UNARY_(Ceil, ceil);
UNARY_(Round, round);
UNARY_(Trunc, trunc);
UNARY_(Frac, frac);
UNARY_(Erf, erf);
UNARY_(Erfc, erfc);
UNARY_(Erfinv, erfinv);
UNARY_(Sinc, sinc);
UNARY_(Hardsigmoid, hardsigmoid);
UNARY_(Hardswish, hardswish);
UNARY_(Mish, mish);
UNARY(Silu, silu);
UNARY(Inverse, inverse);
UNARY_(Digamma, digamma);
UNARY_(Lgamma, lgamma);
OP(aclnnNanToNum, (In self, float nan, float pos, float neg, Out out), out = at::nan_to_num(self, nan, pos, neg));
OP(aclnnInplaceNanToNum, (Out self, float nan, float pos, float neg), self = at::nan_to_num(self, nan, pos, neg));
OP(aclnnRoundDecimals, (In self, int64_t decimals, Out out), out = at::round(self, decimals));
