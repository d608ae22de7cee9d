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

// The states of a block: in place where they are float32, else decoded into memory of this object.
class DecodedStates {
 public:
  DecodedStates(const Operands& operands, const EncodedSegment& segment, int64_t first, int64_t n)
      : operands_(operands), at_(segment.begin + first), scale_(segment.first_scale + first / kScaleNumel), n_(n) {
    for (int k = 0; k < kMaxStates; ++k) {
      const StateBuffer& state = operands.state(k);
      if (state.data == nullptr || state.is_plain()) {
        states_.state[k] = state.data == nullptr ? nullptr : static_cast<float*>(state.data) + at_;
      } else {
        states_.state[k] = copies_[k];
        decode_state(state, at_, scale_, copies_[k], n);
      }
    }
  }

  DecodedStates(const DecodedStates&) = delete;
  DecodedStates& operator=(const DecodedStates&) = delete;

  const States<float>& states() const { return states_; }

  void encode(const uint32_t (*random)[kBlockNumel]) const {
    for (int k = 0; k < kMaxStates; ++k) {
      const StateBuffer& state = operands_.state(k);
      if (states_[k] == copies_[k]) {
        encode_state(state, at_, scale_, copies_[k], random[k / 2], k % 2 * 16, n_);
      }
    }
  }

 private:
  const Operands& operands_;
  const int64_t at_, scale_, n_;
  States<float> states_;
  alignas(64) float copies_[kMaxStates][kBlockNumel];
};

template <typename Rule>
void update_block(const Operands& operands, const Rule& rule, const EncodedSegment& segment, int64_t first, int64_t n) {
  const Encoding& encoding = operands.encoding();
  const auto position = static_cast<uint32_t>(segment.position);
  const int64_t at = segment.begin + first;
  alignas(64) float param_copy[kBlockNumel];
  alignas(64) uint32_t random[2][kBlockNumel];
  for (uint32_t pair = 0; pair < 2; ++pair) {
    if (operands.is_encoded(2 * pair) || (pair == 0 && operands.is_encoded(1))) {
      fill_random(random[pair], first, position, encoding.count(), pair);
    }
  }
  float* param = operands.param(at, n, param_copy);
  const GradBlock<float> grad(operands, at, n);
  const DecodedStates states(operands, segment, first, n);
  vectorized(rule, param, grad.data(), states.states(), n);
  states.encode(random);
  if (encoding.stochastic_param()) {
    fill_random(random[0], first, position, encoding.count(), kParamPair);
    operands.write_back_stochastically(at, n, param, random[0]);
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
