// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Softmax, losses and their gradients.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnSoftmax, (In self, int64_t dim, Out out), out = at::_softmax(self(), dim, false));
OP(aclnnSoftmaxBackward, (In grad, In output, int64_t dim, Out out),
   out = at::_softmax_backward_data(grad(), output(), dim, output().scalar_type()));
OP(aclnnLogSoftmax, (In self, int64_t dim, Out out), out = at::_log_softmax(self(), dim, false));
OP(aclnnLogSoftmaxBackward, (In grad, In output, int64_t dim, Out out),
   out = at::_log_softmax_backward_data(grad(), output(), dim, output().scalar_type()));
OP(aclnnMseLoss, (In self, In target, int64_t r, Out out), out = at::mse_loss(self(), target(), r));
OP(aclnnMseLossOut, (In self, In target, int64_t r, Out out), out = at::mse_loss(self(), target(), r));
OP(aclnnMseLossBackward, (In grad, In self, In target, int64_t r, Out out),
   out = at::mse_loss_backward(grad(), self(), target(), r));
OP(aclnnL1Loss, (In self, In target, int64_t r, Out out), out = at::l1_loss(self(), target(), r));
OP(aclnnL1LossBackward, (In grad, In self, In target, int64_t r, Out out), {
  at::Tensor g = grad() * at::sign(self() - target());
  out = r == 1 ? g / self().numel() : g;
});
OP(aclnnSmoothL1Loss, (In self, In target, int64_t r, float beta, Out out),
   out = at::smooth_l1_loss(self(), target(), r, beta));
OP(aclnnSmoothL1LossBackward, (In grad, In self, In target, int64_t r, float beta, Out out),
   out = at::smooth_l1_loss_backward(grad(), self(), target(), r, beta));
OP(aclnnKlDiv, (In self, In target, int64_t r, bool log, Out out), out = at::kl_div(self(), target(), r, log));
OP(aclnnKlDivBackward, (In grad, In self, In target, int64_t r, bool log, Out out), {
  at::Tensor g = -(log ? target().exp() : target()) * grad();
  out = r == 1 ? g / self().numel() : g;
});
OP(aclnnNLLLoss, (In self, In target, In weight, int64_t r, int64_t ignore, Out out, Out total), {
  auto [loss, sum] = at::nll_loss_forward(self(), target().to(at::kLong), weight.maybe(), r, ignore);
  out = loss;
  total = sum.reshape(total().sizes());
});
OP(aclnnNLLLossBackward, (In grad, In self, In target, In weight, int64_t r, int64_t ignore, In total, Out out),
   out = at::nll_loss_backward(grad(), self(), target().to(at::kLong), weight.maybe(), r, ignore,
                               total().reshape({}).to(self().scalar_type())));
OP(aclnnNLLLoss2d, (In self, In target, In weight, int64_t r, int64_t ignore, Out out, Out total), {
  auto [loss, sum] = at::nll_loss2d_forward(self(), target().to(at::kLong), weight.maybe(), r, ignore);
  out = loss;
  total = sum.reshape(total().sizes());
});
OP(aclnnNLLLoss2dBackward, (In grad, In self, In target, In weight, int64_t r, int64_t ignore, In total, Out out),
   out = at::nll_loss2d_backward(grad(), self(), target().to(at::kLong), weight.maybe(), r, ignore,
                                 total().reshape({}).to(self().scalar_type())));
OP(aclnnSoftMarginLoss, (In self, In target, int64_t r, Out out), out = at::soft_margin_loss(self(), target(), r));
OP(aclnnSoftMarginLossBackward, (In grad, In self, In target, int64_t r, Out out),
   out = at::soft_margin_loss_backward(grad(), self(), target(), r));
OP(aclnnMultilabelMarginLoss, (In self, In target, int64_t r, Out out, Out is_target),
   std::tie(out, is_target) = at::multilabel_margin_loss_forward(self(), target().to(at::kLong), r));
OP(aclnnCtcLoss, (In log_probs, In targets, Ints inputs, Ints lengths, int64_t blank, bool zero, Out loss, Out alpha), {
  auto [l, a] = at::_ctc_loss(log_probs().to(at::kFloat), targets(), inputs(), lengths(), blank, zero);
  loss = l;
  if (alpha().sizes() == a.sizes())
    alpha = a;
  else
    alpha = at::constant_pad_nd(a, {0, alpha().size(2) - a.size(2)});
});
OP(aclnnCtcLossBackward,
   (In grad, In log_probs, In targets, Ints inputs, Ints lengths, In loss, In alpha, int64_t blank, bool zero, Out out),
   {
     auto [l, a] = at::_ctc_loss(log_probs().to(at::kFloat), targets(), inputs(), lengths(), blank, zero);
     out = at::_ctc_loss_backward(grad().to(at::kFloat), log_probs().to(at::kFloat), targets(), inputs(), lengths(), l,
                                  a, blank, zero);
   });
OP(aclnnBinaryCrossEntropy, (In self, In target, In weight, int64_t r, Out out),
   out = at::binary_cross_entropy(self(), target(), weight.maybe(), r));
OP(aclnnBinaryCrossEntropyBackward, (In grad, In self, In target, In weight, int64_t r, Out out),
   out = at::binary_cross_entropy_backward(grad(), self(), target(), weight.maybe(), r));
OP(aclnnBinaryCrossEntropyWithLogits, (In self, In target, In weight, In pos, int64_t r, Out out),
   out = at::binary_cross_entropy_with_logits(self(), target(), weight.maybe(), pos.maybe(), r));
OP(aclnnBinaryCrossEntropyWithLogitsBackward, (In grad, In self, In target, In weight, In pos, int64_t r, Out out), {
  at::Tensor s = self().sigmoid(), g;
  if (pos.p) {
    const at::Tensor t = pos() * target();
    g = (s * (t + 1 - target()) - t) * grad();
  } else {
    g = (s - target()) * grad();
  }
  if (weight.p) g = g * weight();
  out = r == 1 ? g / self().numel() : g;
});
OP(aclnnKlDivTargetBackward, (In grad, In self, In target, int64_t r, bool log, Out out), {
  const at::Tensor x = self(), t = target();
  const at::Tensor g = grad() * (log ? t.exp() * (t - x + 1) : at::where(t > 0, t.log() + 1 - x, at::zeros_like(t)));
  out = r == 1 ? g / t.numel() : g;
});
