// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Operators on lists of tensors, one launch each.
#include "aclnn.h"

using namespace host_cann;

#define FOREACH(Name, fn) \
  OP(aclnnForeach##Name, (InList x, OutList out), for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i])))
FOREACH(Abs, abs);
FOREACH(Neg, neg);
FOREACH(Sqrt, sqrt);
FOREACH(Exp, exp);
FOREACH(Log, log);
FOREACH(Reciprocal, reciprocal);
FOREACH(Sigmoid, sigmoid);
FOREACH(Tanh, tanh);
FOREACH(Sin, sin);
FOREACH(Cos, cos);
FOREACH(Erf, erf);
FOREACH(Expm1, expm1);
FOREACH(Sign, sign);
FOREACH(Log1p, log1p);
FOREACH(Log2, log2);
FOREACH(Log10, log10);
FOREACH(Acos, acos);
FOREACH(Asin, asin);
FOREACH(Atan, atan);
FOREACH(Cosh, cosh);
FOREACH(Erfc, erfc);
FOREACH(Sinh, sinh);
FOREACH(Tan, tan);
OP(aclnnForeachCopy, (InList x, OutList out), for (size_t i = 0; i < x.size(); ++i) out.set(i, x[i]));
OP(aclnnForeachZeroInplace, (OutList x), for (size_t i = 0; i < x.size(); ++i) x.set(i, at::zeros_like(x[i])));

// By one number, as CANN's first version has it in a tensor and its second in a scalar; by a number each; by a list.
#define BY_NUMBER(Name, fn, fn_of_number)                                                   \
  OP(aclnnForeach##Name##Scalar, (InList x, In number, OutList out),                        \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i], number().reshape({})))); \
  OP(aclnnForeach##Name##ScalarV2, (InList x, Number number, OutList out),                  \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn_of_number(x[i], number())));   \
  OP(aclnnForeach##Name##ScalarList, (InList x, NumberList numbers, OutList out),           \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn_of_number(x[i], numbers[i])))
#define BY_LIST(Name, fn)                                         \
  OP(aclnnForeach##Name##List, (InList x, InList y, OutList out), \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i], y[i])))
BY_NUMBER(Add, add, add);
BY_NUMBER(Sub, sub, sub);
BY_NUMBER(Mul, mul, mul);
BY_NUMBER(Div, div, div);
BY_NUMBER(Pow, pow, pow);
BY_NUMBER(Maximum, maximum, clamp_min);
BY_NUMBER(Minimum, minimum, clamp_max);
BY_LIST(Mul, mul);
BY_LIST(Div, div);
BY_LIST(Pow, pow);
BY_LIST(Maximum, maximum);
BY_LIST(Minimum, minimum);
OP(aclnnForeachAddList, (InList x, InList y, In alpha, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, x[i] + y[i] * alpha()));
OP(aclnnForeachSubList, (InList x, InList y, In alpha, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, x[i] - y[i] * alpha()));
OP(aclnnForeachAddListV2, (InList x, InList y, Number alpha, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, at::add(x[i], y[i], alpha())));
OP(aclnnForeachSubListV2, (InList x, InList y, Number alpha, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, at::sub(x[i], y[i], alpha())));
OP(aclnnForeachPowScalarAndTensor, (Number base, InList x, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, at::pow(base(), x[i])));
OP(aclnnForeachLerpList, (InList x, InList y, InList w, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, at::lerp(x[i], y[i], w[i])));
OP(aclnnForeachLerpScalar, (InList x, InList y, Number w, OutList out),
   for (size_t i = 0; i < x.size(); ++i) out.set(i, at::lerp(x[i], y[i], w())));

#define FOREACH3(Name, fn)                                                                    \
  OP(aclnnForeach##Name##Scalar, (InList x, InList y, InList z, In v, OutList out),           \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i], y[i], z[i], v().item()))); \
  OP(aclnnForeach##Name##ScalarV2, (InList x, InList y, InList z, Number v, OutList out),     \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i], y[i], z[i], v())));        \
  OP(aclnnForeach##Name##ScalarList, (InList x, InList y, InList z, In v, OutList out),       \
     for (size_t i = 0; i < x.size(); ++i) out.set(i, at::fn(x[i], y[i], z[i], v()[i].item())))
FOREACH3(Addcmul, addcmul);
FOREACH3(Addcdiv, addcdiv);
OP(aclnnForeachNorm, (InList x, Number p, OutList out),
   for (size_t i = 0; i < x.size(); ++i)
       out.set(i, at::linalg_vector_norm(x[i].to(at::kDouble), p()).reshape(out[i].sizes())));
OP(aclnnForeachNonFiniteCheckAndUnscale, (OutList grads, Out found, In inverse), {
  bool finite = true;
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor grad = grads[i];
    finite = finite && at::isfinite(grad).all().item<bool>();
    grads.set(i, (grad.to(at::kFloat) * inverse().to(at::kFloat).reshape({})).to(grad.scalar_type()));
  }
  if (!finite) found = at::ones_like(found());
});
OP(aclnnAmpUpdateScale,
   (In scale, In tracker, In found, double growth, double backoff, int64_t interval, Out new_scale, Out new_tracker), {
     at::Tensor s = scale().clone(), t = tracker().clone();
     at::_amp_update_scale_(s, t, found(), growth, backoff, interval);
     new_scale = s;
     new_tracker = t;
   });
