// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Work on segments (of a flat buffer, or tensors of their own), cut into pieces and shared out to threads. The cuts
// depend on the lengths alone, never on how many threads there are: sums over pieces, added in order, are always the
// same.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "fused_optim/vectors.h"
#include "parallel.h"

namespace apex_npu {

// Elements of a piece. All that an update reads of them fits into a core's second-level cache.
constexpr int64_t kPieceNumel = 1 << 14;

struct Piece {
  int64_t segment;
  int64_t begin, numel;  // its range
  bool whole;            // the only piece of its segment
};

// Raises ValueError or TypeError, in the name of `op`, where the segments [starts[i], starts[i] + lengths[i]) leave a
// buffer of `numel` elements or overlap, or are not int64 on the host.
void check_segments(const char* op, const at::Tensor& starts, const at::Tensor& lengths, int64_t numel);

class Pieces {
 public:
  Pieces() = default;

  // Of segments that have been checked.
  Pieces(const at::Tensor& starts, const at::Tensor& lengths);

  void add_segment(int64_t segment, int64_t begin, int64_t numel);

  // The pieces of segments that are more than one.
  Pieces of_cut_segments() const;

  size_t size() const { return pieces_.size(); }
  const Piece& operator[](size_t i) const { return pieces_[i]; }

  // work(i) for each piece; a thread gets neighbours, about as many elements as any other.
  template <typename Work>
  void parallel_for_each(const Work& work) const {
    parallel_for(0, numel_, kGrainNumel, [&](int64_t begin, int64_t end) {
      size_t i = std::lower_bound(before_.begin(), before_.end(), begin) - before_.begin();
      for (; i < pieces_.size() && before_[i] < end; ++i) work(i);
    });
  }

  // For work that reads segments a second time, when it knows something of all that it has read of one: first(i) for
  // each piece, between(begin, end) for each segment's range of pieces, which returns whether it is read again, and
  // second(piece) for all pieces of those that are, which `again` holds. One thread takes a segment after the other,
  // and its pieces from the end, which is in the cache then; several would wait for each other after each.
  template <typename First, typename Between, typename Second>
  void parallel_twice(const Pieces& again, const First& first, const Between& between, const Second& second) const {
    const bool alone = at::get_num_threads() == 1;
    if (!alone) parallel_for_each(first);
    for (size_t begin = 0, end; begin < size(); begin = end) {
      for (end = begin; end < size() && pieces_[end].segment == pieces_[begin].segment; ++end) {
        if (alone) first(end);
      }
      const bool is_read_again = between(begin, end);
      for (size_t i = end; alone && is_read_again && i-- > begin;) second(pieces_[i]);
    }
    if (!alone) again.parallel_for_each([&](size_t i) { second(again[i]); });
  }

 private:
  void add(const Piece& piece);

  std::vector<Piece> pieces_;
  std::vector<int64_t> before_;  // elements in the pieces before each
  int64_t numel_ = 0;
};

}  // namespace apex_npu
