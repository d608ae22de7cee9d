// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Runs elementwise rules in one pass over all buffers, split over threads.
#pragma once

#include <algorithm>

#include "fused_optim/encoded_block.h"
#include "fused_optim/operands.h"
#include "fused_optim/vectors.h"
#include "parallel.h"

namespace apex_npu {
// If states or parameters are encoded, each parameter is divided into blocks, because scales and random numbers depend
// on the parameter. Remainders of 16 bits need neither, so without other encodings the flat buffers are divided into
// blocks.
template <typename Rule>
void update_encoded(const Operands& operands, const Rule& rule) {
  const Encoding& encoding = operands.encoding();
  if (operands.has_remainders_alone()) {
    const EncodedSegment all = {0, operands.numel(), 0, 0};
    const int64_t blocks = (all.numel + kBlockNumel - 1) / kBlockNumel;
    parallel_for(0, blocks, kGrainNumel / kBlockNumel, [&](int64_t from, int64_t to) {
      for (int64_t first = from * kBlockNumel; first < std::min(to * kBlockNumel, all.numel); first += kBlockNumel) {
        EncodedBlock(operands, all, first, std::min(kBlockNumel, all.numel - first)).update(rule);
      }
    });
    return;
  }
  parallel_for(0, encoding.blocks(), kGrainNumel / kBlockNumel, [&](int64_t from, int64_t to) {
    encoding.for_blocks(from, to, [&](const EncodedSegment& segment, int64_t first, int64_t n) {
      EncodedBlock(operands, segment, first, n).update(rule);
    });
  });
}

// Calls rule(param, grad, states, n) for all elements, block by block.
template <typename T, typename Rule>
void update_elements(const Operands& operands, const Rule& rule) {
  if constexpr (std::is_same_v<T, float>) {
    if (operands.encoding().given()) {
      update_encoded(operands, rule);
      return;
    }
  }
  const int64_t blocks = (operands.numel() + kBlockNumel - 1) / kBlockNumel;
  parallel_for(0, blocks, kGrainNumel / kBlockNumel, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * kBlockNumel, n = std::min(kBlockNumel, operands.numel() - begin);
      alignas(64) T param_copy[kBlockNumel], grad_copy[kBlockNumel];
      T* const param = operands.param(begin, n, param_copy);
      vectorized(rule, param, operands.grad(begin, n, grad_copy), operands.states<T>(begin), n);
      operands.write_back<T>(begin, n, param);
    }
  });
}

}  // namespace apex_npu
