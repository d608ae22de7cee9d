// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/pieces.h"

#include <utility>

namespace apex_npu {
namespace {

void check_apart(const char* op, const int64_t* starts, const int64_t* lengths, int64_t count) {
  std::vector<std::pair<int64_t, int64_t>> order;  // start and index
  order.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] != 0) order.emplace_back(starts[i], i);
  }
  if (!std::is_sorted(order.begin(), order.end())) std::sort(order.begin(), order.end());
  for (size_t k = 1; k < order.size(); ++k) {
    const int64_t end = order[k - 1].first + lengths[order[k - 1].second];
    TORCH_CHECK_VALUE(end <= order[k].first, op, ": segments ", order[k - 1].second, " and ", order[k].second,
                      " overlap at element ", order[k].first);
  }
}

}  // namespace

void check_segments(const char* op, const at::Tensor& starts, const at::Tensor& lengths, int64_t numel) {
  for (const at::Tensor* t : {&starts, &lengths}) {
    TORCH_CHECK_TYPE(t->scalar_type() == at::kLong && t->device().is_cpu() && t->dim() == 1 && t->is_contiguous(), op,
                     ": starts and lengths must be flat int64 tensors on the host, got ", t->toString());
  }
  TORCH_CHECK_VALUE(starts.numel() == lengths.numel(), op, ": starts and lengths must have one length, got ",
                    starts.numel(), " and ", lengths.numel());
  const int64_t count = starts.numel();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(start[i] >= 0 && length[i] >= 0 && start[i] <= numel && length[i] <= numel - start[i], op,
                      ": segment ", i, " [", start[i], ", ", start[i], " + ", length[i], ") is outside the buffer of ",
                      numel, " elements");
  }
  check_apart(op, start, length, count);
}

Pieces::Pieces(const at::Tensor& starts, const at::Tensor& lengths) {
  pieces_.reserve(starts.numel());
  before_.reserve(starts.numel());
  for (int64_t i = 0; i < starts.numel(); ++i) {
    add_segment(i, starts.const_data_ptr<int64_t>()[i], lengths.const_data_ptr<int64_t>()[i]);
  }
}

void Pieces::add_segment(int64_t segment, int64_t begin, int64_t numel) {
  for (int64_t done = 0; done < numel; done += kPieceNumel) {
    const int64_t part = std::min(kPieceNumel, numel - done);
    add({segment, begin + done, part, part == numel});
  }
}

Pieces Pieces::of_cut_segments() const {
  Pieces cut;
  for (const Piece& piece : pieces_) {
    if (!piece.whole) cut.add(piece);
  }
  return cut;
}

void Pieces::add(const Piece& piece) {
  pieces_.push_back(piece);
  before_.push_back(numel_);
  numel_ += piece.numel;
}

}  // namespace apex_npu
