// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// A block of operands with encoded states or parameters.
#pragma once

#include <algorithm>

#include "fused_optim/operands.h"
#include "fused_optim/state_codec.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// The elements [first, first + n) of a parameter. `first` is a multiple of kBlockNumel, and n <= kBlockNumel.
class EncodedBlock {
 public:
  EncodedBlock(const Operands& operands, const EncodedSegment& segment, int64_t first, int64_t n)
      : operands_(operands),
        first_(first),
        at_(segment.begin + first),
        scale_(segment.first_scale + first / kScaleNumel),
        n_(n),
        position_(static_cast<uint32_t>(segment.position)) {}

  // Calls rule(param, grad, states, n). The loop of the rule itself decodes and encodes bfloat16 parameters and states,
  // because a copy would take longer than they save.
  template <typename Rule>
  void update(const Rule& rule) {
    const bool in_rule = operands_.is_bfloat16_encoded();
    int16_t* const remainder = operands_.remainder(at_);
    const BFloat16* narrow = in_rule ? operands_.narrow_grad(at_, n_) : nullptr;
    if (in_rule && remainder != nullptr) {
      const RemainderValues<BFloat16> param = {operands_.narrow_param(at_), remainder};
      if (narrow != nullptr) {
        update_states(rule, param, NarrowValues<>{narrow});
      } else {
        update_states(rule, param, grad());
      }
    } else if (narrow == nullptr) {
      float* param = this->param();
      update_states(rule, param, grad());
      store_param(param);
    } else {
      const RandomWords words = random(kParamPair);
      update_states(rule, RoundedValues<0>{operands_.narrow_param(at_), words.words}, NarrowValues<>{narrow});
    }
  }

  // Returns the parameters in place if they are float32, else copies.
  float* param() { return operands_.param(at_, n_, param_); }
  const float* grad() { return operands_.grad(at_, n_, grad_); }
  // Returns float32 copies of the first `count` states, which `store_copies` encodes.
  States<float> copies(int count) {
    States<float> states = {};
    for (int k = 0; k < count; ++k) {
      states.state[k] = states_[k];
      if (operands_.is_encoded(k)) {
        decode_state(operands_.state(k), at_, scale_, states_[k], n_);
      } else {
        std::copy_n(in_place<float>(k), n_, states_[k]);
      }
    }
    return states;
  }
  void store_copies(int count) {
    encode_states();
    for (int k = 0; k < count; ++k) {
      if (!operands_.is_encoded(k)) std::copy_n(states_[k], n_, in_place<float>(k));
    }
  }
  void store_param(const float* param) const {
    if (operands_.rounds_param_stochastically()) {
      operands_.write_back_stochastically(at_, n_, param, random(kParamPair));
    } else {
      operands_.write_back(at_, n_, param);
    }
  }

 private:
  // The pair of the random bits of parameters. Each two states have a pair, from 0 on.
  static constexpr uint32_t kParamPair = 255;

  // Longer than blocks, so that no two rows begin at the same offset in a page, where a load of one would wait for a
  // store to the other.
  static constexpr int64_t kRow = kBlockNumel + 208;

  struct PairWords {
    RandomWords pairs[(kMaxStates + 1) / 2];
  };

  template <typename Rule, typename Param, typename Grad>
  void update_states(const Rule& rule, Param param, Grad grad) {
    if (operands_.are_rounded()) {
      const PairWords words = random_of_states();
      RoundedStates<> states = {{}, {words.pairs[0].words, words.pairs[1].words}};
      for (int k = 0; k < kMaxStates; ++k) states.state[k] = in_place<BFloat16>(k);
      vectorized_wide(rule, param, grad, states, n_);
    } else {
      States<float> states;
      for (int k = 0; k < kMaxStates; ++k) {
        states.state[k] = operands_.is_encoded(k) ? states_[k] : in_place<float>(k);
        if (operands_.is_encoded(k)) decode_state(operands_.state(k), at_, scale_, states_[k], n_);
      }
      vectorized_wide(rule, param, grad, states, n_);
      encode_states();
    }
  }

  void encode_states() {
    const PairWords words = random_of_states();
    for (int k = 0; k < kMaxStates; ++k) {
      if (!operands_.is_encoded(k)) continue;
      encode_state(operands_.state(k), at_, scale_, states_[k], words.pairs[k / 2], k % 2, n_);
    }
  }

  template <typename T>
  T* in_place(int k) const {
    auto* data = static_cast<T*>(operands_.state(k).data);
    return data == nullptr ? nullptr : data + at_;
  }

  RandomWords random(uint32_t pair) const { return {first_, position_, operands_.encoding().count(), pair}; }

  PairWords random_of_states() const {
    PairWords words;
    for (int k = 0; k < kMaxStates; ++k) {
      const bool is_first = k % 2 == 0 || !operands_.is_encoded(k - 1);
      if (operands_.is_encoded(k) && is_first) words.pairs[k / 2] = random(static_cast<uint32_t>(k / 2));
    }
    return words;
  }

  const Operands& operands_;
  const int64_t first_, at_, scale_, n_;
  const uint32_t position_;
  alignas(64) float param_[kRow];
  float grad_[kRow];
  float states_[kMaxStates][kRow];
};

}  // namespace apex_npu
