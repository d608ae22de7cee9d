// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Embeddings, and operators that read or write where indices or masks say.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnEmbedding, (In weight, In indices, Out out), out = at::embedding(weight(), indices().to(at::kLong)));
OP(aclnnEmbeddingDenseBackward, (In grad, In indices, uint64_t count, uint64_t padding, bool scale, Out out),
   out = at::embedding_dense_backward(grad(), indices().to(at::kLong), count, static_cast<int64_t>(padding), scale));
OP(aclnnEmbeddingBag,
   (In weight, In indices, In offsets, bool scale, int64_t mode, bool sparse, In per_sample, bool include_last,
    int64_t padding, Out out, Out offset2bag, Out bag_size, Out max_indices),
   {
     auto [bags, bag_of, sizes, largest] = at::_embedding_bag(weight(), indices(), offsets(), scale, mode, sparse,
                                                              per_sample.maybe(), include_last, padding);
     out = bags;
     // Of sums and means torch_npu wants more of what it does not use than the CPU gives.
     const auto padded = [](const at::Tensor& part, const Out& to) {
       at::Tensor whole = at::zeros_like(to());
       if (part.numel() <= whole.numel()) whole.flatten().narrow(0, 0, part.numel()).copy_(part.flatten());
       return whole;
     };
     offset2bag = padded(bag_of, offset2bag);
     bag_size = padded(sizes, bag_size);
     max_indices = mode == 2 ? largest : padded(largest, max_indices);
   });
OP(aclnnGather, (In self, int64_t dim, In index, Out out), out = at::gather(self(), dim, index()));
OP(aclnnGatherV3, (In self, int64_t dim, In index, int64_t, int64_t, Out out),
   out = at::index_select(self(), dim, index()).reshape(out().sizes()));
OP(aclnnIndexSelect, (In self, int64_t dim, In index, Out out), out = at::index_select(self(), dim, index()));
OP(aclnnTake, (In self, In index, Out out), out = at::take(self(), index()));

// The indices of what is not empty: those without elements are colons.
static c10::List<std::optional<at::Tensor>> positions(const InList& indices) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& index : indices()) {
    if (!index.defined() || index.numel() == 0)
      list.push_back(std::nullopt);
    else
      list.push_back(index.scalar_type() == at::kInt ? index.to(at::kLong) : index);
  }
  return list;
}
// Whether an index is empty. torch_npu has a tensor of sizes {0} and of the dtype of `self` where there is a colon. If
// that is a dtype of indices, too, an empty index is a colon where another index has elements.
static bool select_nothing(const at::Tensor& self, const InList& indices) {
  bool any_elements = false;
  for (const at::Tensor& index : indices()) {
    const bool may_be_colon = index.dim() == 1 && index.scalar_type() == self.scalar_type();
    if (index.numel() == 0 && !may_be_colon) return true;
    any_elements = any_elements || index.numel() > 0;
  }
  return !any_elements;
}
OP(aclnnIndex, (In self, InList indices, Out out), {
  if (out().numel() > 0) out = at::index(self(), positions(indices));
});
OP(aclnnIndexPutImpl, (Out self, InList indices, In values, bool accumulate, bool), {
  if (!select_nothing(self(), indices)) self = at::index_put(self(), positions(indices), values(), accumulate);
});
OP(aclnnIndexAdd, (In self, int64_t dim, In index, In source, Number alpha, Out out),
   out = at::index_add(self(), dim, index(), source(), alpha()));
OP(aclnnIndexAddV2, (In self, int64_t dim, In index, In source, Number alpha, int64_t, Out out),
   out = at::index_add(self(), dim, index(), source(), alpha()));
OP(aclnnInplaceIndexCopy, (Out self, int64_t dim, In index, In source),
   self = at::index_copy(self(), dim, index(), source()));
OP(aclnnIndexFill, (In self, int64_t dim, In index, Number value, Out out),
   out = at::index_fill(self(), dim, index(), value()));
OP(aclnnInplaceIndexFill, (Out self, int64_t dim, In index, Number value),
   self = at::index_fill(self(), dim, index(), value()));
OP(aclnnIndexFillTensor, (In self, int64_t dim, Ints index, Number value, Out out),
   out = at::index_fill(self(), dim, at::tensor(index()), value()));
OP(aclnnInplaceIndexFillTensor, (Out self, int64_t dim, Ints index, Number value),
   self = at::index_fill(self(), dim, at::tensor(index()), value()));

static at::Tensor scattered(at::Tensor self, int64_t dim, const at::Tensor& index, const at::Tensor& source,
                            int64_t reduce) {
  if (reduce == 0) return at::scatter(self, dim, index, source);
  if (reduce == 1) return at::scatter(self, dim, index, source, "add");
  if (reduce == 2) return at::scatter(self, dim, index, source, "multiply");
  TORCH_CHECK(false, "scatter with reduction ", reduce);
}
OP(aclnnScatter, (In self, int64_t dim, In index, In src, int64_t reduce, Out out),
   out = scattered(self(), dim, index(), src(), reduce));
OP(aclnnInplaceScatter, (Out self, int64_t dim, In index, In src, int64_t reduce),
   self = scattered(self(), dim, index(), src(), reduce));
OP(aclnnScatterValue, (In self, int64_t dim, In index, Number value, int64_t reduce, Out out),
   out = scattered(self(), dim, index(), at::full_like(index(), value(), self().options()), reduce));
OP(aclnnInplaceScatterValue, (Out self, int64_t dim, In index, Number value, int64_t reduce),
   self = scattered(self(), dim, index(), at::full_like(index(), value(), self().options()), reduce));
OP(aclnnScatterAdd, (In self, int64_t dim, In index, In src, Out out),
   out = at::scatter_add(self(), dim, index(), src()));
OP(aclnnInplaceMaskedFillScalar, (Out self, In mask, Number value), self = at::masked_fill(self(), mask(), value()));
OP(aclnnInplaceMaskedFillTensor, (Out self, In mask, In value),
   self = at::masked_fill(self(), mask(), value().reshape({})));
OP(aclnnInplaceMaskedScatter, (Out self, In mask, In source), self = at::masked_scatter(self(), mask(), source()));
OP(aclnnRepeatInterleave, (In self, In repeats, int64_t, Out out), out = at::repeat_interleave(self(), repeats()));
OP(aclnnRepeatInterleaveInt, (In self, int64_t repeats, int64_t, Out out),
   out = at::repeat_interleave(self(), repeats));
OP(aclnnRepeatInterleaveWithDim, (In self, In repeats, int64_t dim, int64_t, Out out),
   out = at::repeat_interleave(self(), repeats(), dim));
OP(aclnnRepeatInterleaveIntWithDim, (In self, int64_t repeats, int64_t dim, int64_t, Out out),
   out = at::repeat_interleave(self(), repeats, dim));
OP(aclnnRepeatInterleaveTensor, (In repeats, int64_t, Out out), out = at::repeat_interleave(repeats()));

// Their sizes depend on values: torch_npu asks afterwards how much of `out` there is.
OP(aclnnMaskedSelect, (In self, In mask, Out out), out.write_resized(at::masked_select(self(), mask())));
OP(aclnnNonzeroV2, (In self, Out out), out.write_resized(at::nonzero(self()).t().contiguous()));
OP(aclnnNonzero, (In self, Out out), out.write_resized(at::nonzero(self())));
OP(aclnnUnique, (In self, bool sorted, bool inverse, Out out, Out inverse_out), {
  auto [values, where] = at::_unique(self(), sorted, inverse);
  out.write_resized(values);
  if (inverse) inverse_out = where;
});
OP(aclnnUnique2, (In self, bool sorted, bool inverse, bool counts, Out out, Out inverse_out, Out counts_out), {
  auto [values, where, many] = at::_unique2(self(), sorted, inverse, counts);
  out.write_resized(values);
  if (inverse) inverse_out = where;
  if (counts) counts_out.write_resized(many);
});
