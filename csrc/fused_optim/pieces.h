// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Cuts segments (of a flat buffer, or separate tensors) into pieces, and distributes these over threads. The cuts
// depend only on the lengths, not on the number of threads, so that sums over pieces, added in order, are always equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "fused_optim/vectors.h"
#include "parallel.h"

namespace apex_npu {

// The number of elements of a piece. All operands of an update for them fit into a core's second-level cache.
constexpr int64_t kPieceNumel = 1 << 14;

struct Piece {
  int64_t segment;
  int64_t begin, numel;  // its range
  bool whole;            // the only piece of its segment
};

// Raises ValueError or TypeError, in the name of `op`, if the segments [starts[i], starts[i] + lengths[i]) exceed a
// buffer of `numel` elements, overlap, or are not int64 on the host.
void check_segments(const char* op, const at::Tensor& starts, const at::Tensor& lengths, int64_t numel);

class Pieces {
 public:
  Pieces() = default;

  // Cuts segments that have been checked.
  Pieces(const at::Tensor& starts, const at::Tensor& lengths);

  void add_segment(int64_t segment, int64_t begin, int64_t numel);

  // Returns the pieces of segments with more than one piece.
  Pieces of_cut_segments() const;

  size_t size() const { return pieces_.size(); }
  const Piece& operator[](size_t i) const { return pieces_[i]; }

  // Calls work(i) for each piece. Each thread gets neighbouring pieces with about the same number of elements.
  template <typename Work>
  void parallel_for_each(const Work& work) const {
    parallel_for(0, numel_, kGrainNumel, [&](int64_t begin, int64_t end) {
      size_t i = std::lower_bound(before_.begin(), before_.end(), begin) - before_.begin();
      for (; i < pieces_.size() && before_[i] < end; ++i) work(i);
    });
  }

  // For work that reads segments a second time, with a result of the first reading. Calls first(i) for each piece,
  // between(begin, end) for each segment's range of pieces, which returns whether the segment is read again, and
  // second(piece) for all pieces of such segments, which are in `again`. A single thread processes one segment at a
  // time, and its pieces from the end, which are in the cache. Several threads would have to synchronize for each
  // segment, so they finish all first readings before.
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
  std::vector<int64_t> before_;  // the number of elements before each piece
  int64_t numel_ = 0;
};

}  // namespace apex_npu
