// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// States in fewer bytes than float32, for the CPU kernels. apex_npu/ops/state_codec.py defines the formats; this file
// computes the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// The number of elements that share a scale of an 8-bit state. Blocks are counted from the beginning of each parameter.
constexpr int64_t kScaleNumel = 128;

constexpr int kMaxStates = 3;

// The number of elements that share a word of random bits. Element i of a group adds i * kWeyl (2^32 times the golden
// ratio) to the word. A group is a line of a loop, so that the multiples are constants.
constexpr int kGroup = 16;
static_assert(kGroup * sizeof(float) == 64);
constexpr uint32_t kWeyl = 0x9e3779b9u;

// One parameter in flat buffers: its offset, its number of elements, its position among all parameters of the
// optimizer, and the index of its first scale.
struct EncodedSegment {
  int64_t begin, numel, position, first_scale;
};

// The additional arguments of a call in which states or parameters are encoded.
class Encoding {
 public:
  // Nothing is encoded.
  Encoding() = default;

  // remainder: the remainders of 16-bit parameters. scales: those of each 8-bit state, in the order of the rule. table:
  // int64, a row for each parameter with the numbers of an EncodedSegment. count: the number of the step, for random
  // bits. stochastic_param: bfloat16 parameters are rounded stochastically. Raises ValueError or TypeError.
  Encoding(const std::optional<at::Tensor>& remainder, at::TensorList scales, const at::Tensor& table, int64_t count,
           bool stochastic_param);

  bool given() const { return !segments_.empty() || empty_; }
  const std::optional<at::Tensor>& remainder() const { return remainder_; }
  bool stochastic_param() const { return stochastic_param_; }
  uint32_t count() const { return count_; }
  const std::vector<at::Tensor>& scales() const { return scales_; }
  int64_t end() const { return segments_.empty() ? 0 : segments_.back().begin + segments_.back().numel; }
  int64_t scale_count() const { return scale_count_; }
  // Returns the segment of a parameter that `check` has accepted.
  const EncodedSegment& segment(int64_t i) const { return segments_[i]; }
  // Raises ValueError, in the name of `op`, if segment i does not have this offset and length.
  void check(const char* op, int64_t i, int64_t begin, int64_t numel) const;
  int64_t blocks() const { return block_ends_.empty() ? 0 : block_ends_.back(); }

  // Calls function(segment, first, n) for the blocks [from, to), of at most kBlockNumel elements each. `first` is the
  // offset of the block in its segment.
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
  std::vector<int64_t> block_ends_;  // the number of blocks up to the end of each segment
  int64_t scale_count_ = 0;
  uint32_t count_ = 0;
  bool stochastic_param_ = false, empty_ = false;
};

// The memory and the format of one state of a call. kByte is the unsigned 8-bit format, kChar the signed one.
struct StateBuffer {
  void* data = nullptr;
  at::ScalarType dtype = at::kFloat;
  float* scales = nullptr;  // the scales of all parameters, for 8-bit states

  bool is_plain() const { return dtype == at::kFloat || dtype == at::kDouble; }
};

// The words of the elements [first, first + kBlockNumel) of a parameter; `first` is a multiple of kBlockNumel. State
// 2 · pair uses the lower 16 bits of each sum of a word and a multiple, state 2 · pair + 1 the upper 16 bits.
struct RandomWords {
  RandomWords() = default;
  RandomWords(int64_t first, uint32_t position, uint32_t count, uint32_t pair);

  uint32_t words[kBlockNumel / kGroup];
};

// The classes below replace pointers to float32 in loops: they load from, and store to, another format.

// Reads bfloat16.
template <uint32_t kLength = kGroup>
struct NarrowValues {
  static constexpr uint32_t kLine = kLength;

  const BFloat16* data;

  APEX_NPU_INLINE float operator[](Element i) const { return data[i]; }
};

template <uint32_t count, uint32_t kLength>
APEX_NPU_INLINE void prefetch(const NarrowValues<kLength>& values, int64_t at) {
  prefetch<count>(values.data, at);
}

APEX_NPU_INLINE NarrowValues<2 * kGroup> widened(const NarrowValues<>& values) { return {values.data}; }

// Rounds to a neighbour in bfloat16: away from zero if the sum of `random` (16 bits) and the bits that are cut off has
// a carry.
APEX_NPU_INLINE BFloat16 round_stochastically(float value, uint32_t random) {
  const uint32_t number = mask_of(value == value);  // 0 for nan
  const uint32_t kept = bit_cast<uint32_t>(value) | (0x00400000u & ~number);
  return {static_cast<uint16_t>((kept + (random & number)) >> 16)};
}

// bfloat16, rounded stochastically by the lower or the upper half of the random bits. `data` and `words` begin at the
// same element.
template <int kHalf, uint32_t kLength = kGroup>
struct RoundedValues {
  static constexpr uint32_t kLine = kLength;

  BFloat16* data;
  const uint32_t* words;

  struct Reference {
    BFloat16* place;
    uint32_t random;

    APEX_NPU_INLINE operator float() const { return *place; }
    APEX_NPU_INLINE void operator=(float value) const {
      place->bits = round_stochastically(value, kHalf == 0 ? random & 0xffffu : random >> 16).bits;
    }
  };

  APEX_NPU_INLINE Reference operator[](Element i) const {
    const uint32_t* group = words + (i.index - i.lane) / kGroup;  // the first group of the line
    uint32_t word = group[0];
    if constexpr (kLength > kGroup) word ^= (word ^ group[1]) & (0u - i.lane / kGroup);
    return {data + i.index, word + kWeyl * (i.lane % kGroup)};
  }
};

template <uint32_t count, int kHalf, uint32_t kLength>
APEX_NPU_INLINE void prefetch(const RoundedValues<kHalf, kLength>& values, int64_t at) {
  prefetch<count>(values.data, at);
}

template <int kHalf>
APEX_NPU_INLINE RoundedValues<kHalf, 2 * kGroup> widened(const RoundedValues<kHalf>& values) {
  return {values.data, values.words};
}

// Returns the float32 master of a bfloat16 parameter and its remainder.
APEX_NPU_INLINE float join(BFloat16 param, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(param.bits) << 16, magnitude = upper & 0x7fffffffu;
  const auto lower = static_cast<uint32_t>(static_cast<int32_t>(remainder));
  // A script may have written the parameter. A remainder that would change 0, inf or nan belongs to another value.
  const uint32_t stale = mask_of(magnitude + lower > kFloatInf);  // also if below 0, because of unsigned wraparound
  return bit_cast<float>(upper + (lower & ~stale));
}

// Returns the largest remainder of a float16: half of its last bit if it is even, because ties round to even; else the
// next smaller float32.
APEX_NPU_INLINE int32_t largest_remainder(int32_t magnitude) {
  const int32_t odd = -(magnitude & 1);
  return 0x4000 - (odd & (1 + static_cast<int32_t>(magnitude >= 0x200) + 2 * static_cast<int32_t>(magnitude >= 0x400)));
}

// Returns the float32 master of a float16 parameter and its remainder. The remainder is in units of ulp(param) * 2^-15,
// and clamped so that the master rounds to the parameter.
APEX_NPU_INLINE float join(Half param, int16_t remainder) {
  const auto magnitude = static_cast<int32_t>(param.bits & 0x7fffu);
  const int32_t exponent = std::max(magnitude >> 10, 1), outward = largest_remainder(magnitude);
  const bool is_power = (magnitude & 0x3ff) == 0 && magnitude > 0x0400;
  const int32_t inward = is_power ? 0x2000 : outward, negative = -static_cast<int32_t>(param.bits >> 15);
  const int32_t away = std::min(std::max((remainder ^ negative) - negative, -inward), outward);
  const int32_t units = away & -static_cast<int32_t>(magnitude < 0x7c00);
  const float unit = bit_cast<float>((exponent + 87) << 23);
  const float master = Half{static_cast<uint16_t>(magnitude)} + static_cast<float>(units) * unit;
  return bit_cast<float>(bit_cast<uint32_t>(master) ^ (static_cast<uint32_t>(negative) << 31));
}

// Rounds `value` to the nearest bfloat16, halves away from zero. The rounding error becomes the remainder.
APEX_NPU_INLINE void split(float value, BFloat16* param, int16_t* remainder) {
  const uint32_t nan = mask_of(value != value);
  const uint32_t kept = (bit_cast<uint32_t>(value) | (nan & 0x00400000u)) & ~(nan & 0xffffu);
  param->bits = static_cast<uint16_t>((kept + 0x8000u) >> 16);
  *remainder = static_cast<int16_t>(kept);
}

// Rounds `value` to the nearest float16, ties to even. The rounding error becomes the remainder.
APEX_NPU_INLINE void split(float value, Half* param, int16_t* remainder) {
  *param = value;
  const auto magnitude = static_cast<int32_t>(param->bits & 0x7fffu);
  const int32_t exponent = std::max(magnitude >> 10, 1);
  const float units = (value - *param) * bit_cast<float>((167 - exponent) << 23);
  // The addition rounds to a whole number, in the last bits of the sum.
  const int32_t rounded = bit_cast<int32_t>(units + 0x1.8p23f) - bit_cast<int32_t>(0x1.8p23f);
  const int32_t largest = largest_remainder(magnitude);
  const int32_t kept = std::min(std::max(rounded, -largest), largest);
  *remainder = static_cast<int16_t>(kept & -static_cast<int32_t>(magnitude < 0x7c00));
}

// Reads and writes float32 masters that are kept as 16-bit parameters and remainders.
template <typename Param, uint32_t kLength = kGroup>
struct RemainderValues {
  static constexpr uint32_t kLine = kLength;

  Param* param;
  int16_t* remainder;

  struct Reference {
    Param* param;
    int16_t* remainder;

    APEX_NPU_INLINE operator float() const { return join(*param, *remainder); }
    APEX_NPU_INLINE void operator=(float value) const { split(value, param, remainder); }
  };

  APEX_NPU_INLINE Reference operator[](int64_t i) const { return {param + i, remainder + i}; }
};

template <uint32_t count, typename Param, uint32_t kLength>
APEX_NPU_INLINE void prefetch(const RemainderValues<Param, kLength>& values, int64_t at) {
  prefetch<count>(values.param, at);
  prefetch<count>(values.remainder, at);
}

template <typename Param>
APEX_NPU_INLINE RemainderValues<Param, 2 * kGroup> widened(const RemainderValues<Param>& values) {
  return {values.param, values.remainder};
}

// The states of a rule, in the order of its operands. Null stands for no state.
template <typename T>
struct States {
  T* state[kMaxStates];

  template <int k>
  APEX_NPU_INLINE T* get() const {
    return state[k];
  }
};

// The same for states that are all bfloat16.
template <uint32_t kLength = kGroup>
struct RoundedStates {
  BFloat16* state[kMaxStates];
  const uint32_t* words[(kMaxStates + 1) / 2];  // for each pair of states

  template <int k>
  APEX_NPU_INLINE RoundedValues<k % 2, kLength> get() const {
    return {state[k], words[k / 2]};
  }
};

APEX_NPU_INLINE RoundedStates<2 * kGroup> widened(const RoundedStates<>& states) {
  RoundedStates<2 * kGroup> wide;
  std::copy(std::begin(states.state), std::end(states.state), wide.state);
  std::copy(std::begin(states.words), std::end(states.words), wide.words);
  return wide;
}

template <int k, typename Buffers>
APEX_NPU_INLINE auto get(const Buffers& states) {
  return states.template get<k>();
}

template <int k, typename Buffers>
APEX_NPU_INLINE bool has(const Buffers& states) {
  return states.state[k] != nullptr;
}

// Converts the elements [at, at + n) of `state` to or from float32. `scale` is the index of their first scale.
void decode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, int64_t n);
// May overwrite `values`; `half` is 0 or 1.
void encode_state(const StateBuffer& state, int64_t at, int64_t scale, float* values, const RandomWords& random,
                  int half, int64_t n);

// Converts n masters from, or to, parameters of `dtype` (bfloat16 or float16) and their remainders.
void decode_remainder(void* param, at::ScalarType dtype, int16_t* remainder, float* values, int64_t n);
void encode_remainder(const float* values, void* param, at::ScalarType dtype, int16_t* remainder, int64_t n);

// The same with remainders of 8 bits, which are multiples of 256 and rounded stochastically. n <= kBlockNumel.
void decode_remainder(void* param, at::ScalarType dtype, const int8_t* remainder, float* values, int64_t n);
void encode_remainder(const float* values, void* param, at::ScalarType dtype, int8_t* remainder,
                      const RandomWords& random, int64_t n);

void narrow_stochastically(const float* values, BFloat16* rounded, const RandomWords& random, int64_t n);

}  // namespace apex_npu
