// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Attention in one operator, and its gradient.
#include "aclnn.h"
#include "masks.h"

using namespace host_cann;

// Where a tensor has its axes, by CANN's names: B batch, N heads, S length, D width of a head, H = N * D.
class Layout {
 public:
  Layout(const std::string& name, int64_t heads) : name_(name), heads_(heads) {
    TORCH_CHECK(name == "BNSD" || name == "BSND" || name == "BSH" || name == "SBH", "attention of layout ", name);
  }

  // As BNSD, in float32. `width`: of a head, that of the query.
  at::Tensor heads_first(const at::Tensor& x, int64_t width) const {
    const at::Tensor wide = x.to(at::kFloat);
    if (name_ == "BNSD") return wide;
    if (name_ == "BSND") return wide.transpose(1, 2);
    const at::Tensor split = wide.unflatten(-1, {wide.size(-1) / width, width});
    return name_ == "BSH" ? split.transpose(1, 2) : split.permute({1, 2, 0, 3});
  }

  at::Tensor back(const at::Tensor& x) const {
    if (name_ == "BNSD") return x;
    if (name_ == "BSND") return x.transpose(1, 2);
    return (name_ == "BSH" ? x.transpose(1, 2) : x.permute({2, 0, 1, 3})).flatten(2);
  }

  int64_t width(const at::Tensor& query) const {
    return name_ == "BNSD" || name_ == "BSND" ? query.size(-1) : query.size(-1) / heads_;
  }

 private:
  std::string name_;
  int64_t heads_;
};

// Query heads that share a key head read copies of it, whose gradients are added up.
static at::Tensor repeated(const at::Tensor& x, int64_t heads) { return x.repeat_interleave(heads / x.size(1), 1); }
static at::Tensor added_up(const at::Tensor& grad, int64_t heads) {
  return grad.unflatten(1, {heads, grad.size(1) / heads}).sum(2);
}

// Which scores are masked: those of a mask, where it is 1, or by the sparse mode, which then says what a mask of a
// fixed size is to mean.
static at::Tensor masked(const at::Tensor& scores, const In& mask, int64_t sparse) {
  TORCH_CHECK(sparse >= 0 && sparse <= 3, "attention of sparse mode ", sparse);
  if (sparse < 2) {
    return mask.p ? scores.masked_fill(mask().to(at::kBool), -std::numeric_limits<float>::infinity()) : scores;
  }
  const int64_t late = sparse == 2 ? 0 : scores.size(-1) - scores.size(-2);
  const at::Tensor hidden = at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(late + 1);
  return scores.masked_fill(hidden, -std::numeric_limits<float>::infinity());
}

static at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const In& pse, const In& mask,
                                    double scale, int64_t sparse) {
  at::Tensor scores = at::matmul(q, k.mT()) * scale;
  if (pse.p) scores = scores + pse().to(at::kFloat);
  return at::nan_to_num(at::softmax(masked(scores, mask, sparse), -1), 0.0);
}

static at::Tensor after_dropout(const at::Tensor& x, const In& drop, double keep) {
  return drop.p && keep < 1 ? dropped(x, unpacked(drop(), x.sizes()), keep) : x;
}

// `softmax_max` and `softmax_sum` are not needed for a gradient that computes the weights again.
OP_WITH_TEXT(aclnnFlashAttentionScore,
             (In query, In key, In value, In pse, In drop, In, In mask, Ints, double scale, double keep, int64_t,
              int64_t, int64_t heads, Text layout, int64_t, int64_t sparse, Out softmax_max, Out softmax_sum, Out,
              Out out),
             layout, {
               const Layout axes(layout, heads);
               const int64_t width = axes.width(query());
               const at::Tensor q = axes.heads_first(query(), width);
               const at::Tensor k = repeated(axes.heads_first(key(), width), heads);
               const at::Tensor v = repeated(axes.heads_first(value(), width), heads);
               const at::Tensor weights = attention_weights(q, k, pse, mask, scale, sparse);
               out = axes.back(at::matmul(after_dropout(weights, drop, keep), v));
               softmax_max = at::zeros_like(softmax_max());
               softmax_sum = at::ones_like(softmax_sum());
             });
OP_WITH_TEXT(aclnnFlashAttentionScoreGrad,
             (In query, In key, In value, In dy, In pse, In drop, In, In mask, In, In, In, In, Ints, double scale,
              double keep, int64_t, int64_t, int64_t heads, Text layout, int64_t, int64_t sparse, Out dq, Out dk,
              Out dv, Out),
             layout, {
               const Layout axes(layout, heads);
               const int64_t width = axes.width(query());
               const at::Tensor q = axes.heads_first(query(), width), g = axes.heads_first(dy(), width);
               const at::Tensor keys = axes.heads_first(key(), width), values = axes.heads_first(value(), width);
               const at::Tensor k = repeated(keys, heads), v = repeated(values, heads);
               const at::Tensor weights = attention_weights(q, k, pse, mask, scale, sparse);
               const at::Tensor by_weights = after_dropout(at::matmul(g, v.mT()), drop, keep);
               const at::Tensor by_scores = weights * (by_weights - (by_weights * weights).sum(-1, true)) * scale;
               dq = axes.back(at::matmul(by_scores, k));
               dk = axes.back(added_up(at::matmul(by_scores.mT(), q), keys.size(1)));
               dv = axes.back(added_up(at::matmul(after_dropout(weights, drop, keep).mT(), g), values.size(1)));
             });
