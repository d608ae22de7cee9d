// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Masks of dropout, one bit an element, in whole rows of 128.
#pragma once

#include "aclnn.h"

namespace host_cann {

at::Tensor packed(const at::Tensor& bits, int64_t bytes);
at::Tensor unpacked(const at::Tensor& mask, at::IntArrayRef sizes);
// Elements that are kept, each with probability `keep`.
at::Tensor drawn(at::IntArrayRef sizes, double keep, int64_t seed, int64_t offset);
// Elements of `x` that are kept, divided by `keep`; the others are zero.
at::Tensor dropped(const at::Tensor& x, const at::Tensor& kept, double keep);

}  // namespace host_cann
