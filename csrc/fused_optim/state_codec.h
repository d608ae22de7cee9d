// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// States in fewer bytes than float32, for the kernels of the CPU. apex_npu/ops/state_codec.py defines the formats: what
// is here gives the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// Elements that share the scale of an 8-bit state. Blocks are counted from the beginning of each parameter.
constexpr int64_t kScaleNumel = 128;

constexpr int kMaxStates = 3;

// One parameter in flat buffers: where it begins, its elements, its position among all parameters of the optimizer,
// and the index of its first scale.
struct EncodedSegment {
  int64_t begin, numel, position, first_scale;
};

// What a call has beside the declared arguments where states, or parameters, are encoded.
class Encoding {
 public:
  // Nothing is encoded.
  static const Encoding& none();

  Encoding() = default;

  // See `encoded` in apex_npu/ops/dispatch.py. Raises ValueError or TypeError.
  Encoding(const std::optional<at::Tensor>& remainder, at::TensorList scales, const at::Tensor& table, int64_t count,
           bool stochastic_param);

  bool given() const { return !segments_.empty() || empty_; }
  const std::optional<at::Tensor>& remainder() const { return remainder_; }
  bool stochastic_param() const { return stochastic_param_; }
  uint32_t count() const { return count_; }
  const std::vector<at::Tensor>& scales() const { return scales_; }
  int64_t end() const { return segments_.empty() ? 0 : segments_.back().begin + segments_.back().numel; }
  int64_t scale_count() const { return scale_count_; }
  int64_t blocks() const { return block_ends_.empty() ? 0 : block_ends_.back(); }

  // function(segment, first, n) for blocks [from, to) of at most kBlockNumel elements, `first` counted in the segment.
  template <typename Function>
  void for_blocks(int64_t from, int64_t to, const Function& function) const {
    auto s = static_cast<size_t>(std::upper_bound(block_ends_.begin(), block_ends_.end(), from) - block_ends_.begin());
    for (int64_t i = from; i < to; ++i) {
      while (i >= block_ends_[s]) ++s;
      const int64_t first = (i - (s == 0 ? 0 : block_ends_[s - 1])) * kBlockNumel;
      function(segments_[s], first, std::min(kBlockNumel, segments_[s].numel - first));
    }
  }

 private:
  std::optional<at::Tensor> remainder_;
  std::vector<at::Tensor> scales_;
  std::vector<EncodedSegment> segments_;
  std::vector<int64_t> block_ends_;  // for each segment the number of blocks up to its end
  int64_t scale_count_ = 0;
  uint32_t count_ = 0;
  bool stochastic_param_ = false, empty_ = false;
};

// The states of a rule, in the order of its operands; null where there is none.
template <typename T>
struct States {
  T* state[kMaxStates];

  APEX_NPU_INLINE T* operator[](int k) const { return state[k]; }
};

// One state of a call: its memory, and how it is kept. Of 8 bits, kByte is unsigned and kChar signed.
struct StateBuffer {
  void* data = nullptr;
  at::ScalarType dtype = at::kFloat;
  float* scales = nullptr;  // of 8-bit states, for all parameters

  bool is_plain() const { return dtype == at::kFloat || dtype == at::kDouble; }
};

// 32 random bits for each of the elements [first, first + kBlockNumel) of a parameter; `first` is a multiple of that.
// States 2 · pair and 2 · pair + 1 take the lower and the upper 16.
void fill_random(uint32_t* random, int64_t first, uint32_t position, uint32_t count, uint32_t pair);

// Elements [at, at + n) of `state` to or from float32, `scale` being the index of the first scale.
void decode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, int64_t n);
void encode_state(const StateBuffer& state, int64_t at, int64_t scale, const float* values, const uint32_t* random,
                  int shift, int64_t n);

// A float32 as a bfloat16, rounded to nearest with halves away from zero, and the 16 bits that it lacks.
void decode_remainder(const BFloat16* rounded, const int16_t* remainder, float* values, int64_t n);
void encode_remainder(const float* values, BFloat16* rounded, int16_t* remainder, int64_t n);

void narrow_stochastically(const float* values, BFloat16* rounded, const uint32_t* random, int64_t n);

}  // namespace apex_npu
