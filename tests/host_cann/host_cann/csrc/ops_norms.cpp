// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Layers that normalise, and their gradients.
#include "aclnn.h"
#include "channels.h"

using namespace host_cann;

// In float32 throughout: the CPU's kernels take fewer mixes of dtypes than an NPU's.
static std::optional<at::Tensor> wide(const auto& t) {
  return t.p ? std::optional<at::Tensor>(t().to(at::kFloat)) : std::nullopt;
}
static at::Tensor flat(const auto& t) { return t().to(at::kFloat).contiguous(); }
#define LAYER_NORM(Name, ...)                                                                               \
  OP(Name, (In input, Ints shape, In weight, In bias, double eps, Out out, Out mean, Out rstd __VA_ARGS__), \
     std::tie(out, mean, rstd) = at::native_layer_norm(flat(input), shape(), wide(weight), wide(bias), eps))
LAYER_NORM(aclnnLayerNorm);
LAYER_NORM(aclnnLayerNormWithImplMode, , int32_t);
OP(aclnnLayerNormBackward,
   (In grad, In input, Ints shape, In mean, In rstd, In weight, In bias, Bools mask, Out grad_input, Out grad_weight,
    Out grad_bias),
   std::tie(grad_input, grad_weight, grad_bias) = at::native_layer_norm_backward(flat(grad), flat(input), shape(),
                                                                                 flat(mean), flat(rstd), wide(weight),
                                                                                 wide(bias), mask.get<3>()));
OP(aclnnGroupNorm,
   (In self, In weight, In bias, int64_t n, int64_t c, int64_t hw, int64_t group, double eps, Out out, Out mean,
    Out rstd),
   std::tie(out, mean, rstd) = at::native_group_norm(flat(self), wide(weight), wide(bias), n, c, hw, group, eps));
OP(aclnnGroupNormBackward,
   (In grad, In input, In mean, In rstd, In weight, int64_t n, int64_t c, int64_t hw, int64_t group, Bools mask,
    Out grad_input, Out grad_weight, Out grad_bias),
   std::tie(grad_input, grad_weight, grad_bias) = at::native_group_norm_backward(flat(grad), flat(input), flat(mean),
                                                                                 flat(rstd), wide(weight), n, c, hw,
                                                                                 group, mask.get<3>()));
OP(aclnnBatchNorm,
   (In input, In weight, In bias, Out mean, Out var, bool training, double momentum, double eps, Out out, Out save_mean,
    Out save_invstd),
   {
     auto m = wide(mean), v = wide(var);
     auto [y, batch_mean, batch_invstd] =
         at::native_batch_norm(input().to(at::kFloat), wide(weight), wide(bias), m, v, training, momentum, eps);
     out = y;
     save_mean = training ? batch_mean : *m;
     save_invstd = training ? batch_invstd : (*v + eps).rsqrt();
     if (training && m) mean = *m;
     if (training && v) var = *v;
   });
OP(aclnnBatchNormBackward,
   (In grad, In input, In weight, In mean, In var, In save_mean, In save_invstd, bool training, double eps, Bools mask,
    Out grad_input, Out grad_weight, Out grad_bias),
   std::tie(grad_input, grad_weight,
            grad_bias) = at::native_batch_norm_backward(grad().to(at::kFloat), input().to(at::kFloat), wide(weight),
                                                        wide(mean), wide(var), wide(save_mean), wide(save_invstd),
                                                        training, eps, mask.get<3>()));
OP(aclnnBatchNormReduce, (In input, Out sum, Out squares), {
  const at::Tensor x = input().to(at::kFloat);
  sum = x.sum(all_but_channels(x));
  squares = (x * x).sum(all_but_channels(x));
});
OP(aclnnBatchNormStats, (In input, double eps, Out mean, Out invstd), {
  const at::Tensor x = input().to(at::kFloat);
  mean = x.mean(all_but_channels(x));
  invstd = (at::var(x, at::IntArrayRef(all_but_channels(x)), at::Scalar(0)) + eps).rsqrt();
});
OP(aclnnBatchNormElemt, (In input, In weight, In bias, In mean, In invstd, double, Out out), {
  const at::Tensor x = input();
  at::Tensor y = (x.to(at::kFloat) - by_channel(mean(), x)) * by_channel(invstd(), x);
  if (weight.p) y = y * by_channel(weight(), x);
  if (bias.p) y = y + by_channel(bias(), x);
  out = y.to(x.scalar_type());
});
OP(aclnnBatchNormGatherStatsWithCounts,
   (In input, In mean, In invstd, Out running_mean, Out running_var, double momentum, double eps, In counts,
    Out mean_all, Out invstd_all),
   {
     const at::Tensor n = counts().to(at::kFloat).reshape({-1, 1}), total = n.sum();
     const at::Tensor m = (mean() * n).sum(0) / total;
     const at::Tensor var = (invstd().pow(-2) - eps + (mean() - m).pow(2)).mul(n).sum(0) / total;
     mean_all = m;
     invstd_all = (var + eps).rsqrt();
     if (running_mean.p) running_mean = running_mean() * (1 - momentum) + m * momentum;
     if (running_var.p) running_var = running_var() * (1 - momentum) + var * (total / (total - 1)) * momentum;
   });
OP(aclnnBatchNormReduceBackward,
   (In grad, In input, In mean, In invstd, In weight, bool, bool weight_g, bool bias_g, Out sum_dy, Out sum_dy_xmu,
    Out grad_weight, Out grad_bias),
   {
     const at::Tensor g = grad().to(at::kFloat), x = input().to(at::kFloat);
     const at::Tensor dy = g.sum(all_but_channels(g)), xmu = (g * (x - by_channel(mean(), x))).sum(all_but_channels(g));
     if (sum_dy.p) sum_dy = dy;
     if (sum_dy_xmu.p) sum_dy_xmu = xmu;
     if (weight_g) grad_weight = xmu * invstd();
     if (bias_g) grad_bias = dy;
   });
OP(aclnnBatchNormElemtBackward,
   (In grad, In input, In mean, In invstd, In weight, In sum_dy, In sum_dy_xmu, In counter, Out grad_input), {
     const at::Tensor g = grad().to(at::kFloat), x = input().to(at::kFloat), n = counter().to(at::kFloat).sum();
     at::Tensor factor = by_channel(invstd(), x);
     if (weight.p) factor = factor * by_channel(weight(), x);
     const at::Tensor xmu = x - by_channel(mean(), x);
     grad_input =
         (factor * (g - by_channel(sum_dy(), x) / n - xmu * by_channel(invstd() * invstd() * sum_dy_xmu(), x) / n))
             .to(grad().scalar_type());
   });
