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
namespace detail {

// The random bits of the parameters themselves; each two states have a pair from 0 on.
constexpr uint32_t kParamPair = 255;

// What a block is decoded into. Rows are longer than blocks, so that no two begin at the same place of a page: there a
// load waits for a store to the other row.
struct BlockScratch {
  static constexpr int64_t kRow = kBlockNumel + 208;

  alignas(64) float param[kRow];
  float grad[kRow];
  float states[kMaxStates][kRow];
  uint32_t random[(kMaxStates + 1) / 2][kRow];
};

template <typename Rule>
void update_block(const Operands& operands, const Rule& rule, const EncodedSegment& segment, int64_t first, int64_t n) {
  const Encoding& encoding = operands.encoding();
  const auto position = static_cast<uint32_t>(segment.position);
  const int64_t at = segment.begin + first, scale = segment.first_scale + first / kScaleNumel;
  BlockScratch scratch;
  float* param = operands.param(at, n, scratch.param);
  const float* grad = operands.grad(at, n, scratch.grad);
  States<float> states;
  for (int k = 0; k < kMaxStates; ++k) {
    const StateBuffer& state = operands.state(k);
    if (operands.is_encoded(k)) {
      states.state[k] = scratch.states[k];
      decode_state(state, at, scale, scratch.states[k], n);
    } else {
      states.state[k] = state.data == nullptr ? nullptr : static_cast<float*>(state.data) + at;
    }
  }
  vectorized(rule, param, grad, states, n);
  for (int k = 0; k < kMaxStates; ++k) {
    if (!operands.is_encoded(k)) continue;
    uint32_t* random = scratch.random[k / 2];
    if (k % 2 == 0 || !operands.is_encoded(k - 1)) {
      fill_random(random, first, position, encoding.count(), static_cast<uint32_t>(k / 2));
    }
    encode_state(operands.state(k), at, scale, scratch.states[k], random, k % 2 * 16, n);
  }
  if (encoding.stochastic_param()) {
    fill_random(scratch.random[0], first, position, encoding.count(), kParamPair);
    operands.write_back_stochastically(at, n, param, scratch.random[0]);
  } else {
    operands.write_back(at, n, static_cast<const float*>(param));
  }
}

}  // namespace detail

// Where states or parameters are encoded: blocks are those of each parameter.
template <typename Rule>
void update_encoded(const Operands& operands, const Rule& rule) {
  const Encoding& encoding = operands.encoding();
  parallel_for(0, encoding.blocks(), kGrainNumel / kBlockNumel, [&](int64_t from, int64_t to) {
    encoding.for_blocks(from, to, [&](const EncodedSegment& segment, int64_t first, int64_t n) {
      detail::update_block(operands, rule, segment, first, n);
    });
  });
}

// rule(param, grad, states, n) for all elements, block by block.
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
      const ParamBlock<T> param(operands, begin, n);
      const GradBlock<T> grad(operands, begin, n);
      vectorized(rule, param.data(), grad.data(), operands.states<T>(begin), n);
      param.write_back();
    }
  });
}

}  // namespace apex_npu
