// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Elementwise rules: one pass over all buffers, split over threads.
#pragma once

#include <algorithm>

#include "fused_optim/operands.h"
#include "fused_optim/vectors.h"
#include "parallel.h"

namespace apex_npu {

// rule(param, grad, begin, n) for all elements, block by block; the rule finds its states at `begin`.
template <typename T, typename Rule>
void update_elements(const Operands& operands, const Rule& rule) {
  const int64_t blocks = (operands.numel() + kBlockNumel - 1) / kBlockNumel;
  parallel_for(0, blocks, kGrainNumel / kBlockNumel, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * kBlockNumel, n = std::min(kBlockNumel, operands.numel() - begin);
      const ParamBlock<T> param(operands, begin, n);
      const GradBlock<T> grad(operands, begin, n);
      vectorized(rule, param.data(), grad.data(), begin, n);
      param.write_back();
    }
  });
}

}  // namespace apex_npu
