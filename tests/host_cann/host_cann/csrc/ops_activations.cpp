// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Activations and their gradients.
#include "aclnn.h"
#include "channels.h"

using namespace host_cann;
// The first versions have the tanh formula alone.
OP(aclnnGelu, (In self, Out out), out = at::gelu(self(), "tanh"));
OP(aclnnGeluV2, (In self, int64_t approximate, Out out), out = at::gelu(self, approximate ? "tanh" : "none"));
OP(aclnnSelu, (In self, Out out), out = at::selu(self()));
OP(aclnnLeakyRelu, (In self, Number slope, Out out), out = at::leaky_relu(self, slope()));
OP(aclnnInplaceLeakyRelu, (Out self, Number slope), self = at::leaky_relu(self, slope()));
OP(aclnnElu, (In self, Number alpha, Number scale, Number input, Out out),
   out = at::elu(self, alpha(), scale(), input()));
OP(aclnnInplaceElu, (Out self, Number alpha, Number scale, Number input),
   self = at::elu(self, alpha(), scale(), input()));
OP(aclnnCelu, (In self, Number alpha, Out out), out = at::celu(self, alpha()));
OP(aclnnInplaceCelu, (Out self, Number alpha), self = at::celu(self, alpha()));
OP(aclnnSoftplus, (In self, Number beta, Number threshold, Out out), out = at::softplus(self, beta(), threshold()));
OP(aclnnHardtanh, (In self, Number lo, Number hi, Out out), out = at::hardtanh(self, lo(), hi()));
OP(aclnnInplaceHardtanh, (Out self, Number lo, Number hi), self = at::hardtanh(self, lo(), hi()));
OP(aclnnHardshrink, (In self, Number lambda, Out out), out = at::hardshrink(self, lambda()));
OP(aclnnSoftshrink, (In self, Number lambda, Out out), out = at::softshrink(self, lambda()));
OP(aclnnThreshold, (In self, Number threshold, Number value, Out out), out = at::threshold(self, threshold(), value()));
OP(aclnnInplaceThreshold, (Out self, Number threshold, Number value), self = at::threshold(self, threshold(), value()));
OP(aclnnLogSigmoidForward, (In self, Out out, Out), out = at::log_sigmoid(self));
OP(aclnnLogSigmoid, (In self, Out out), out = at::log_sigmoid(self));
OP(aclnnPrelu, (In self, In weight, Out out), out = at::prelu(self(), weight().reshape(-1)));

// ---- gradients ----
OP(aclnnThresholdBackward, (In grad, In self, Number threshold, Out out),
   out = at::threshold_backward(grad(), self(), threshold()));
OP(aclnnSigmoidBackward, (In grad, In output, Out out), out = at::sigmoid_backward(grad(), output()));
OP(aclnnTanhBackward, (In grad, In output, Out out), out = at::tanh_backward(grad(), output()));
OP(aclnnGeluBackward, (In grad, In self, Out out), out = at::gelu_backward(grad(), self(), "tanh"));
OP_WITH_TEXT(aclnnGeluBackwardV2, (In grad, In self, Text approximate, Out out), approximate,
             out = at::gelu_backward(grad(), self(), approximate));
OP(aclnnSiluBackward, (In grad, In self, Out out), out = at::silu_backward(grad(), self()));
OP(aclnnMishBackward, (In grad, In self, Out out), out = at::mish_backward(grad(), self()));
OP(aclnnHardswishBackward, (In grad, In self, Out out), out = at::hardswish_backward(grad(), self()));
OP(aclnnHardswishBackwardV2, (In grad, In self, Out out), out = at::hardswish_backward(grad(), self()));
OP(aclnnHardsigmoidBackward, (In grad, In self, Out out), out = at::hardsigmoid_backward(grad(), self()));
OP(aclnnLeakyReluBackward, (In grad, In self, Number slope, bool result, Out out),
   out = at::leaky_relu_backward(grad(), self(), slope(), result));
OP(aclnnEluBackward, (In grad, Number alpha, Number scale, Number input, bool result, In self, Out out),
   out = at::elu_backward(grad(), alpha(), scale(), input(), result, self()));
OP(aclnnSoftplusBackward, (In grad, In self, Number beta, Number threshold, Out out),
   out = at::softplus_backward(grad(), self(), beta(), threshold()));
OP(aclnnHardtanhBackward, (In grad, In self, Number lo, Number hi, Out out),
   out = at::hardtanh_backward(grad(), self(), lo(), hi()));
OP(aclnnHardshrinkBackward, (In grad, In self, Number lambda, Out out),
   out = at::hardshrink_backward(grad(), self(), lambda()));
OP(aclnnSoftshrinkBackward, (In grad, In self, Number lambda, Out out),
   out = at::softshrink_backward(grad(), self(), lambda()));
OP(aclnnLogSigmoidBackward, (In grad, In self, In, Out out),
   out = at::log_sigmoid_backward(grad(), self(), at::exp(-at::abs(self()))));
OP(aclnnPreluBackward, (In grad, In self, In weight, Out grad_input, Out grad_weight), {
  auto [gi, gw] = at::_prelu_kernel_backward(
      grad(), self(), weight().dim() == 1 && self().dim() > 1 ? by_channel(weight(), self()) : weight());
  grad_input = gi;
  grad_weight = weight().numel() == 1 ? gw.sum().reshape(weight().sizes()) : gw.sum(all_but_channels(gw));
});
OP(aclnnGlu, (In self, int64_t dim, Out out), out = at::glu(self(), dim));
OP(aclnnGluBackward, (In grad, In self, int64_t dim, Out out), out = at::glu_backward(grad(), self(), dim));
