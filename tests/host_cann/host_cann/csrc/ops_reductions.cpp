// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Sums, extremes, norms, and sorting.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnReduceSum, (In self, Ints dim, bool keep, Type type, Out out),
   out = at::sum(self(), dim.maybe(), keep, scalar_type(type)));
OP(aclnnMean, (In self, Ints dim, bool keep, Type type, Out out),
   out = at::mean(self(), dim.maybe(), keep, scalar_type(type)));
OP(aclnnMeanV2, (In self, Ints dim, bool keep, bool, Out out), out = at::mean(self(), dim.maybe(), keep));
OP(aclnnProd, (In self, Type type, Out out), out = at::prod(self(), scalar_type(type)));
OP(aclnnProdDim, (In self, int64_t dim, bool keep, Type type, Out out),
   out = at::prod(self(), dim, keep, scalar_type(type)));
OP(aclnnCumsum, (In self, int64_t dim, Type type, Out out), out = at::cumsum(self(), dim, scalar_type(type)));
OP(aclnnCumsumV2, (In self, int64_t dim, bool exclusive, bool reverse, Out out), {
  TORCH_CHECK(!exclusive && !reverse, "exclusive or reversed");
  out = at::cumsum(self(), dim);
});
OP(aclnnCumprod, (In self, Number dim, Type type, Out out),
   out = at::cumprod(self(), dim().toLong(), scalar_type(type)));
OP(aclnnMax, (In self, Out out), out = at::max(self()));
OP(aclnnMin, (In self, Out out), out = at::min(self()));
OP(aclnnMaxV2, (In self, Ints dim, bool keep, bool, Out out), out = at::amax(self(), dim(), keep));
OP(aclnnAmax, (In self, Ints dim, bool keep, Out out), out = at::amax(self(), dim(), keep));
OP(aclnnAmin, (In self, Ints dim, bool keep, Out out), out = at::amin(self(), dim(), keep));
OP(aclnnMaxDim, (In self, int64_t dim, bool keep, Out out, Out indices),
   std::tie(out, indices) = at::max(self(), dim, keep));
OP(aclnnMinDim, (In self, int64_t dim, bool keep, Out out, Out indices),
   std::tie(out, indices) = at::min(self(), dim, keep));
OP(aclnnArgMax, (In self, int64_t dim, bool keep, Out out), out = at::argmax(self(), dim, keep));
OP(aclnnArgMin, (In self, int64_t dim, bool keep, Out out), out = at::argmin(self(), dim, keep));
OP(aclnnAll, (In self, Ints dim, bool keep, Out out),
   out = dim.empty() ? at::all(self()) : at::all(self(), dim.maybe(), keep));
OP(aclnnAny, (In self, Ints dim, bool keep, Out out),
   out = dim.empty() ? at::any(self()) : at::any(self(), dim.maybe(), keep));
OP(aclnnNorm, (In self, Number p, Ints dim, bool keep, Out out),
   out = dim.empty() ? at::norm(self().to(at::kDouble), p()) : at::norm(self().to(at::kDouble), p(), dim(), keep));
OP(aclnnLinalgVectorNorm, (In self, Number ord, Ints dim, bool keep, Type type, Out out),
   out = at::linalg_vector_norm(self().to(at::kDouble), ord(), dim.maybe(), keep));
OP(aclnnVar, (In self, Ints dim, bool unbiased, bool keep, Out out),
   out = at::var(self(), dim.maybe(), at::Scalar(int64_t(unbiased)), keep));
OP(aclnnVarCorrection, (In self, Ints dim, int64_t correction, bool keep, Out out),
   out = at::var(self(), dim.maybe(), at::Scalar(correction), keep));
OP(aclnnStd, (In self, Ints dim, int64_t correction, bool keep, Out out),
   out = at::std(self(), dim.maybe(), at::Scalar(correction), keep));
OP(aclnnVarMean, (In self, Ints dim, int64_t correction, bool keep, Out var, Out mean),
   std::tie(var, mean) = at::var_mean(self(), dim.maybe(), at::Scalar(correction), keep));
OP(aclnnStdMeanCorrection, (In self, Ints dim, int64_t correction, bool keep, Out std_, Out mean),
   std::tie(std_, mean) = at::std_mean(self(), dim.maybe(), at::Scalar(correction), keep));
OP(aclnnLogSumExp, (In self, Ints dim, bool keep, Out out), out = at::logsumexp(self(), dim(), keep));
OP(aclnnTrace, (In self, Out out), out = at::trace(self()));
OP(aclnnSort, (In self, bool stable, int64_t dim, bool descending, Out values, Out indices),
   std::tie(values, indices) = at::sort(self(), stable, dim, descending));
OP(aclnnTopk, (In self, int64_t k, int64_t dim, bool largest, bool sorted, Out values, Out indices),
   std::tie(values, indices) = at::topk(self(), k, dim, largest, sorted));
OP(aclnnBincount, (In self, In weights, int64_t minlength, Out out),
   out = at::bincount(self(), weights.maybe(), minlength));
OP(aclnnBucketize, (In self, In boundaries, bool int32, bool right, Out out),
   out = at::bucketize(self(), boundaries(), int32, right));
OP(aclnnSearchSorted, (In sorted, In self, bool int32, bool right, In sorter, Out out),
   out = at::searchsorted(sorted(), self(), int32, right, std::nullopt, sorter.maybe()));
