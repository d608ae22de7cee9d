// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Convolutions and their gradients.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnConvolution,
   (In input, In weight, In bias, Ints stride, Ints padding, Ints dilation, bool transposed, Ints output_padding,
    int64_t groups, Out out, int8_t),
   out = at::convolution(input(), weight(), bias.maybe(), stride(), padding(), dilation(), transposed, output_padding(),
                         groups));
OP(aclnnConvDepthwise2d, (In self, In weight, Ints, In bias, Ints stride, Ints padding, Ints dilation, Out out, int8_t),
   out = at::conv2d(self(), weight(), bias.maybe(), stride(), padding(), dilation(), self().size(1)));
OP(aclnnConvolutionBackward,
   (In grad, In input, In weight, Ints bias_sizes, Ints stride, Ints padding, Ints dilation, bool transposed,
    Ints output_padding, int groups, Bools mask, int8_t, Out grad_input, Out grad_weight, Out grad_bias),
   std::tie(grad_input, grad_weight,
            grad_bias) = at::convolution_backward(grad(), input(), weight(), bias_sizes.maybe(), stride(), padding(),
                                                  dilation(), transposed, output_padding(), groups, mask.get<3>()));
OP(aclnnConvTbc, (In self, In weight, In bias, int64_t pad, Out out, int8_t),
   out = at::conv_tbc(self(), weight(), bias(), pad));
OP(aclnnConvTbcBackward,
   (In grad, In input, In weight, In bias, int64_t pad, int8_t, Out grad_input, Out grad_weight, Out grad_bias),
   std::tie(grad_input, grad_weight, grad_bias) = at::conv_tbc_backward(grad(), input(), weight(), bias(), pad));
