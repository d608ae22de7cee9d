// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Linear algebra beyond products.
#include "aclnn.h"

using namespace host_cann;
OP(aclnnTriangularSolve, (In self, In a, bool upper, bool transpose, bool unit, Out x, Out m), {
  const at::Tensor coefficients = transpose ? a().mT() : a();
  x = at::linalg_solve_triangular(coefficients, self(), transpose ? !upper : upper, true, unit);
  m = a();
});
OP(aclnnLinalgQr, (In self, int64_t mode, Out q, Out r),
   std::tie(q, r) = at::linalg_qr(self(), mode == 0   ? "reduced"
                                          : mode == 1 ? "complete"
                                                      : "r"));
OP(aclnnLinalgCholesky, (In self, bool upper, Out out), out = at::linalg_cholesky(self(), upper));
OP(aclnnSvd, (In self, bool full, bool uv, Out s, Out u, Out v), {
  auto [left, values, right] = at::linalg_svd(self(), full);
  s = values;
  if (uv) {
    u = left;
    v = right.mT();
  }
});
OP(aclnnSlogdet, (In self, Out sign, Out log), std::tie(sign, log) = at::linalg_slogdet(self()));
OP(aclnnLinalgCross, (In self, In other, int64_t dim, Out out), out = at::linalg_cross(self(), other(), dim));
OP(aclnnCdist, (In a, In b, float p, int64_t, Out out), out = at::cdist(a(), b(), p));
OP(aclnnPdist, (In self, float p, Out out), out = at::pdist(self(), p));
OP(aclnnRenorm, (In self, Number p, int64_t dim, Number most, Out out), out = at::renorm(self(), p(), dim, most()));
OP(aclnnInplaceRenorm, (Out self, Number p, int64_t dim, Number most), self = at::renorm(self(), p(), dim, most()));
