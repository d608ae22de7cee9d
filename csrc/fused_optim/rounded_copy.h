// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// float16 or bfloat16 copies of float32 parameters, either of which a script may write: which of the two it was, and
// what follows for the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "combine_tensors/borrowed.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// Every slot of a flat buffer begins at a multiple of so many elements.
constexpr int64_t kLineNumel = 16;

// A copy of parameters in one buffer. It keeps a checksum of each line that `write` has rounded: where a copy is not
// its parameter, rounded, an unchanged checksum tells that the parameter has been written, a changed one the copy.
// Blocks begin where a line does.
class RoundedCopy {
 public:
  // `lines`: which lines of the buffer hold a copy; empty: all do.
  RoundedCopy(int64_t numel, c10::ScalarType dtype, const void* base, std::vector<bool> lines = {});

  // Elements [begin, begin + n), n <= kBlockNumel, are about to be updated: those whose copy a script has written take
  // the value of the copy.
  void take(float* param, const uint16_t* copy, int64_t begin, int64_t n);

  // copy = param, rounded.
  void write(const float* param, uint16_t* copy, int64_t begin, int64_t n);

  // take(), then write(), for elements [0, numel).
  void take_and_write(float* param, uint16_t* copy);
  // Either alone; take() of elements [begin, begin + n).
  void take_all(float* param, const uint16_t* copy, int64_t begin, int64_t n);
  void write_all(const float* param, uint16_t* copy);

  // Whether of elements [begin, begin + n), n <= kLineNumel, a parameter has been written, and the copy has not.
  bool param_is_written(const float* param, const uint16_t* copy, int64_t begin, int64_t n) const;

  // Whether of elements [begin, begin + n) of the copy any has been written.
  bool copy_is_written(const uint16_t* copy, int64_t begin, int64_t n) const;

  // Whether all of elements [begin, begin + n) of the copy have been rounded here.
  bool is_known(int64_t begin, int64_t n) const;

  // So many elements are in the lines of [begin, begin + n): those and the padding of a slot.
  int64_t whole_lines(int64_t begin, int64_t n) const;

  // Elements [begin, begin + n) of the copy are as write() would have left them.
  void note(const uint16_t* copy, int64_t begin, int64_t n);

  // How many elements take() has found written since the last call: copies, and parameters.
  std::pair<int64_t, int64_t> counts();

  // Whether it is that of just this tensor; or, was, before the tensor was given another address, maybe.
  bool is_of(const at::Tensor& copy) const;
  bool is_like(const at::Tensor& copy) const;

  // The place of an address in the buffer; negative where the n elements from there on are not in it.
  int64_t offset_of(const void* address, int64_t n) const;

 private:
  template <typename Work>
  static void for_each_block(int64_t numel, const Work& work);
  void take_different(float* param, const uint16_t* copy, const uint16_t* rounded, int64_t begin, int64_t n);
  uint32_t checksum_of(const uint16_t* words, int64_t line) const;

  int64_t numel_;
  c10::ScalarType dtype_;
  const void* base_;
  std::vector<bool> lines_;
  std::vector<uint32_t> checksums_;  // of each line; 0: it has not been rounded here
  std::atomic<int64_t> copies_written_{0}, params_written_{0};
};

// Has the kernels watch `flat`, a buffer of which the `numels` elements from `offsets` on are copies.
void watch_copies(const at::Tensor& flat, const std::vector<int64_t>& offsets, const std::vector<int64_t>& numels);

// That of the buffer that `tensor` is in; null: there is none, or it reaches over its end.
RoundedCopy* rounded_copy_of(const at::Tensor& tensor);

// take_and_write() for a watched buffer and its parameters; false where `flat` is not watched.
bool round_to_copies(const at::Tensor& params, const at::Tensor& flat);

// counts() of a watched buffer; zeros for others.
std::pair<int64_t, int64_t> written_copies(const at::Tensor& flat);

// The copies of parameters, those that are in no watched buffer for the most part. On a CPU alone: other pairs are left
// to the caller.
class RoundedCopies {
 public:
  // The indices of pairs whose copy has been written, those whose parameter has, and those that are left out: of these
  // it is not known what the copy was rounded to.
  struct Written {
    std::vector<int64_t> copies, params, others;
  };

  // Has parameters take what scripts have written to their copies since these were rounded.
  Written take(const Borrowed& params, const Borrowed& copies);

  // Rounds each parameter into its copy. Returns the indices of the pairs that are left out.
  std::vector<int64_t> write(const Borrowed& params, const Borrowed& copies);

  // What these copies hold, those in watched buffers included, is what their parameters have been rounded to, by
  // others.
  void note(const Borrowed& params, const Borrowed& copies);

  // The indices of the pairs of which a parameter has been written, and the copy has not; nothing is changed.
  std::vector<int64_t> written_params(const Borrowed& params, const Borrowed& copies) const;

  // The indices of the pairs of which the copy has been written; nothing is changed.
  std::vector<int64_t> written_copies(const Borrowed& copies) const;

  // The indices of the pairs whose copy holds what was rounded, be it at another address, and of those whose parameter
  // would be rounded to something else. `places`: where the copies were; a copy itself where it is not known.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> since(const Borrowed& params, const Borrowed& copies,
                                                              const Borrowed& places) const;

  // Whether a parameter has been written: a look at a few elements of a few of the pairs.
  bool glance(const Borrowed& params, const Borrowed& copies) const;

 private:
  RoundedCopy* find(const at::Tensor& param, const at::Tensor& copy);
  RoundedCopy* known(const at::Tensor& copy) const;
  bool param_is_written(const at::Tensor& param, const at::Tensor& tensor, int64_t begin) const;

  std::unordered_map<const void*, std::unique_ptr<RoundedCopy>> each_;  // by the copy's TensorImpl
};

}  // namespace apex_npu
