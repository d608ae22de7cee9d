// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Pooling, upsampling and sampling, and their gradients.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnAdaptiveAvgPool2d, (In self, Ints size, Out out), out = at::_adaptive_avg_pool2d(self(), size()));
OP(aclnnAdaptiveAvgPool2dBackward, (In grad, In self, Out out),
   out = at::_adaptive_avg_pool2d_backward(grad(), self()));
OP(aclnnAvgPool3d, (In self, Ints k, Ints s, Ints p, bool ceil, bool pad, int64_t divisor, Out out),
   out = at::avg_pool3d(self(), k(), s(), p(), ceil, pad, divisor ? std::optional<int64_t>(divisor) : std::nullopt));
OP(aclnnAvgPool3dBackward, (In grad, In self, Ints k, Ints s, Ints p, bool ceil, bool pad, int64_t divisor, Out out),
   out = at::avg_pool3d_backward(grad(), self(), k(), s(), p(), ceil, pad,
                                 divisor ? std::optional<int64_t>(divisor) : std::nullopt));
OP(aclnnAvgPool2d, (In self, Ints k, Ints s, Ints p, bool ceil, bool pad, int64_t divisor, int8_t, Out out),
   out = at::avg_pool2d(self(), k(), s(), p(), ceil, pad, divisor ? std::optional<int64_t>(divisor) : std::nullopt));
OP(aclnnAvgPool2dBackward,
   (In grad, In self, Ints k, Ints s, Ints p, bool ceil, bool pad, int64_t divisor, int8_t, Out out),
   out = at::avg_pool2d_backward(grad(), self(), k(), s(), p(), ceil, pad,
                                 divisor ? std::optional<int64_t>(divisor) : std::nullopt));
OP(aclnnMaxPool2dWithIndices, (In self, Ints k, Ints s, Ints p, Ints d, bool ceil, Out out, Out indices),
   std::tie(out, indices) = at::max_pool2d_with_indices(self(), k(), s(), p(), d(), ceil));
OP(aclnnMaxPool2dWithIndicesBackward,
   (In grad, In self, In indices, Ints k, Ints s, Ints p, Ints d, bool ceil, Out out),
   out = at::max_pool2d_with_indices_backward(grad(), self(), k(), s(), p(), d(), ceil, indices().to(at::kLong)));

// The mask is in a layout of its own, for the gradient alone, which finds the places again.
OP(aclnnMaxPool2dWithMask, (In self, Ints k, Ints s, Ints p, Ints d, bool ceil, Out out, Out),
   out = std::get<0>(at::max_pool2d_with_indices(self(), k(), s(), p(), d(), ceil)));
OP(aclnnMaxPool2dWithMaskBackward, (In grad, In self, In, Ints k, Ints s, Ints p, Ints d, bool ceil, Out out),
   out = at::max_pool2d_with_indices_backward(grad(), self(), k(), s(), p(), d(), ceil,
                                              std::get<1>(at::max_pool2d_with_indices(self(), k(), s(), p(), d(),
                                                                                      ceil))));

// Without a scale factor, CANN computes one from the sizes.
static std::optional<double> factor(double scale) { return scale > 0 ? std::optional<double>(scale) : std::nullopt; }
OP(aclnnUpsampleNearest2d, (In self, Ints size, Out out), out = at::upsample_nearest2d(self(), size()));
OP(aclnnUpsampleNearest2dV2, (In self, Ints size, float h, float w, Out out),
   out = at::upsample_nearest2d(self(), size(), factor(h), factor(w)));
OP(aclnnUpsampleNearest2dBackward, (In grad, Ints size, Ints input, double h, double w, Out out),
   out = at::upsample_nearest2d_backward(grad(), size(), input(), factor(h), factor(w)));
OP(aclnnUpsampleBilinear2d, (In self, Ints size, bool align, double h, double w, Out out),
   out = at::upsample_bilinear2d(self(), size(), align, factor(h), factor(w)));
OP(aclnnUpsampleBilinear2dBackward, (In grad, Ints size, Ints input, bool align, double h, double w, Out out),
   out = at::upsample_bilinear2d_backward(grad(), size(), input(), align, factor(h), factor(w)));
OP(aclnnUpsampleBilinear2dBackwardV2, (In grad, Ints size, Ints input, bool align, double h, double w, Out out),
   out = at::upsample_bilinear2d_backward(grad(), size(), input(), align, factor(h), factor(w)));
OP(aclnnGridSampler2D, (In input, In grid, int64_t mode, int64_t padding, bool align, Out out),
   out = at::grid_sampler_2d(input(), grid(), mode, padding, align));
OP(aclnnGridSampler2DBackward,
   (In grad, In input, In grid, int64_t mode, int64_t padding, bool align, Bools mask, Out grad_input, Out grad_grid),
   std::tie(grad_input, grad_grid) = at::grid_sampler_2d_backward(grad(), input(), grid(), mode, padding, align,
                                                                  mask.get<2>()));
