// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Attention in one operator, and its gradient.
#include "aclnn.h"

using namespace host_cann;

// Attention of [batch, heads, length, width]: what is masked is 1 in the mask; `softmax_max` and `softmax_sum` are kept
// eight times, as an NPU does.
static at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const In& pse, const In& mask,
                                    double scale) {
  at::Tensor scores = at::matmul(q, k.mT()) * scale;
  if (pse.p) scores = scores + pse().to(at::kFloat);
  if (mask.p) scores = scores.masked_fill(mask().to(at::kBool), -std::numeric_limits<float>::infinity());
  return at::nan_to_num(at::softmax(scores, -1), 0.0);
}
OP_WITH_TEXT(aclnnFlashAttentionScore,
             (In query, In key, In value, In pse, In drop, In, In mask, Ints, double scale, double keep, int64_t,
              int64_t, int64_t, Text layout, int64_t, int64_t sparse, Out softmax_max, Out softmax_sum, Out, Out out),
             layout, {
               TORCH_CHECK(layout == "BNSD" && !drop.p && keep == 1.0 && sparse == 0, "attention of layout ", layout,
                           ", with dropout, or of sparse mode ", sparse);
               const at::Tensor q = query().to(at::kFloat);
               const at::Tensor weights = attention_weights(q, key().to(at::kFloat), pse, mask, scale);
               out = at::matmul(weights, value().to(at::kFloat));
               softmax_max = at::zeros_like(softmax_max());
               softmax_sum = at::ones_like(softmax_sum());
             });
OP_WITH_TEXT(aclnnFlashAttentionScoreGrad,
             (In query, In key, In value, In dy, In pse, In drop, In, In mask, In, In, In, In, Ints, double scale,
              double keep, int64_t, int64_t, int64_t, Text layout, int64_t, int64_t sparse, Out dq, Out dk, Out dv,
              Out),
             layout, {
               TORCH_CHECK(layout == "BNSD" && !drop.p && keep == 1.0 && sparse == 0, "attention of layout ", layout,
                           ", with dropout, or of sparse mode ", sparse);
               const at::Tensor q = query().to(at::kFloat), k = key().to(at::kFloat), v = value().to(at::kFloat),
                                g = dy().to(at::kFloat);
               const at::Tensor weights = attention_weights(q, k, pse, mask, scale);
               const at::Tensor by_weights = at::matmul(g, v.mT());
               const at::Tensor by_scores = weights * (by_weights - (by_weights * weights).sum(-1, true)) * scale;
               dq = at::matmul(by_scores, k);
               dk = at::matmul(by_scores.mT(), q);
               dv = at::matmul(weights.mT(), g);
             });
