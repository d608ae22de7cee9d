// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Random numbers and dropout.
#include "aclnn.h"
#include "masks.h"

using namespace host_cann;
OP(aclnnInplaceNormal, (Out self, float mean, float sd, int64_t seed, int64_t offset),
   self = at::empty_like(self()).normal_(mean, sd, generator(seed, offset)));
OP(aclnnInplaceUniform, (Out self, double from, double to, uint64_t seed, uint64_t offset),
   self = at::empty_like(self()).uniform_(from, to, generator(seed, offset)));
OP(aclnnInplaceRandom, (Out self, int64_t from, int64_t to, int64_t seed, int64_t offset),
   self = at::empty_like(self()).random_(from, to, generator(seed, offset)));
OP(aclnnInplaceRandomWithoutFromTo, (Out self, int64_t seed, int64_t offset),
   self = at::empty_like(self()).random_(generator(seed, offset)));
OP(aclnnInplaceBernoulli, (Out self, Number p, int64_t seed, int64_t offset),
   self = at::empty_like(self()).bernoulli_(p().toDouble(), generator(seed, offset)));
OP(aclnnInplaceBernoulliTensor, (Out self, In p, int64_t seed, int64_t offset),
   self = at::empty_like(self()).bernoulli_(p(), generator(seed, offset)));
OP(aclnnRandperm, (int64_t n, int64_t seed, int64_t offset, Out out),
   out = at::randperm(n, generator(seed, offset), out().options()));
OP(aclnnMultinomial, (In self, int64_t n, bool replacement, int64_t seed, int64_t offset, Out out),
   out = at::multinomial(self(), n, replacement, generator(seed, offset)));
OP(aclnnSimThreadExponential, (Out self, int64_t, double lambda, int64_t seed, int64_t offset),
   self = at::empty_like(self()).exponential_(lambda, generator(seed, offset)));
OP(aclnnNormalFloatFloat, (float mean, float sd, int64_t seed, int64_t offset, Out out),
   out = at::empty_like(out()).normal_(mean, sd, generator(seed, offset)));
OP(aclnnNormalTensorFloat, (In mean, float sd, int64_t seed, int64_t offset, Out out),
   out = at::normal(mean(), sd, generator(seed, offset)));
OP(aclnnNormalTensorTensor, (In mean, In sd, int64_t seed, int64_t offset, Out out),
   out = at::normal(mean(), sd(), generator(seed, offset)));

namespace host_cann {

at::Tensor packed(const at::Tensor& bits, int64_t bytes) {
  at::Tensor out = at::zeros({bytes}, at::kByte);
  const bool* in = bits.const_data_ptr<bool>();
  auto* to = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < bits.numel(); ++i) to[i / 8] |= uint8_t(in[i]) << (i % 8);
  return out;
}
at::Tensor unpacked(const at::Tensor& mask, at::IntArrayRef sizes) {
  at::Tensor out = at::empty(sizes, at::kBool);
  const auto* from = mask.const_data_ptr<uint8_t>();
  bool* to = out.data_ptr<bool>();
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = from[i / 8] >> (i % 8) & 1;
  return out;
}
at::Tensor drawn(at::IntArrayRef sizes, double keep, int64_t seed, int64_t offset) {
  return at::empty(sizes, at::kFloat).bernoulli_(keep, generator(seed, offset)).to(at::kBool);
}
at::Tensor dropped(const at::Tensor& x, const at::Tensor& kept, double keep) {
  return at::where(kept, x / keep, at::zeros({}, x.options()));
}

}  // namespace host_cann

OP(aclnnDropoutGenMask, (Ints sizes, double p, int64_t seed, int64_t offset, Out out),
   out = packed(drawn(sizes(), 1 - p, seed, offset), out().numel()));
OP(aclnnDropoutGenMaskV2, (Ints sizes, double p, int64_t seed, int64_t offset, Type, Out out),
   out = packed(drawn(sizes(), 1 - p, seed, offset), out().numel()));
OP(aclnnDropoutDoMask, (In self, In mask, double p, Out out),
   out = dropped(self(), unpacked(mask(), self().sizes()), 1 - p));
OP(aclnnDropoutV3, (In self, In, double p, int64_t seed, int64_t offset, Out out, Out mask), {
  const at::Tensor kept = drawn(self().sizes(), 1 - p, seed, offset);
  mask = packed(kept, mask().numel());
  out = dropped(self(), kept, 1 - p);
});
