// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Optimizers in one operator.
#include "aclnn.h"

using namespace host_cann;

// ---- optimizers, as CANN's kernels compute: in float32, `step` counted from 0 ----
OP(aclnnApplyAdamWV2,
   (Out var, Out m, Out v, Out max_v, In grad, In step, float lr, float beta1, float beta2, float decay, float eps,
    bool amsgrad, bool maximize),
   {
     const float steps = step().to(at::kFloat).item<float>() + 1;
     const at::Tensor g = maximize ? -grad().to(at::kFloat) : grad().to(at::kFloat);
     const at::Tensor p = var().to(at::kFloat) * (1 - lr * decay);
     const at::Tensor m1 = m().to(at::kFloat) * beta1 + g * (1 - beta1);
     const at::Tensor v1 = v().to(at::kFloat) * beta2 + g * g * (1 - beta2);
     at::Tensor second = v1;
     if (amsgrad) second = at::maximum(max_v().to(at::kFloat), v1);
     const float correction1 = 1 - std::pow(beta1, steps);
     const float correction2 = 1 - std::pow(beta2, steps);
     const at::Tensor denominator = (second / correction2).sqrt() + eps;
     var = (p - lr * (m1 / correction1) / denominator).to(var.dtype());
     m = m1.to(m.dtype());
     v = v1.to(v.dtype());
     if (amsgrad) max_v = second.to(max_v.dtype());
   });
OP(aclnnFusedSgd,
   (OutList params, InList grads, OutList buffers, In scale, float decay, float momentum, float lr, float dampening,
    bool nesterov, bool maximize, bool first),
   {
     for (size_t i = 0; i < params.size(); ++i) {
       at::Tensor g = grads[i].to(at::kFloat);
       if (scale.p) g = g / scale();
       if (maximize) g = -g;
       const at::Tensor p = params[i].to(at::kFloat);
       if (decay != 0) g = g + p * decay;
       if (momentum != 0) {
         const at::Tensor b = first ? g : buffers[i].to(at::kFloat) * momentum + g * (1 - dampening);
         buffers.set(i, b.to(buffers[i].scalar_type()));
         g = nesterov ? g + b * momentum : b;
       }
       params.set(i, (p - g * lr).to(params[i].scalar_type()));
     }
   });
