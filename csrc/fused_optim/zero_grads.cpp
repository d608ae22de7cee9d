// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/zero_grads.h"

#include <ATen/core/Tensor.h>

#include <cstring>

#include "fused_optim/pieces.h"

namespace apex_npu {
namespace {

bool is_plain(const at::Tensor& t) {
  // Subclasses may have no memory but that of tensors inside (DTensor), lazy ones other values in it; inference tensors
  // must not be written here; torch raises the error for that.
  return t.layout() == c10::kStrided && t.device().is_cpu() && t.has_storage() && !t.is_inference() &&
         !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_neg() && !t.is_conj() && !t._is_zerotensor() &&
         t.is_non_overlapping_and_dense();
}

}  // namespace

std::vector<int64_t> zero_grads_cpu(const Borrowed& tensors) {
  std::vector<int64_t> others;
  std::vector<char*> data;  // obtained by one thread: memory may have to be copied before it is written
  data.reserve(tensors.size());
  Pieces pieces;  // of bytes
  look_at_grads(tensors, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    if (!is_plain(grad)) {
      others.push_back(static_cast<int64_t>(i));
      return;
    }
    pieces.add_segment(static_cast<int64_t>(data.size()), 0, static_cast<int64_t>(grad.nbytes()));
    data.push_back(static_cast<char*>(grad.mutable_data_ptr()));
    grad.unsafeGetTensorImpl()->bump_version();
  });
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    std::memset(data[piece.segment] + piece.begin, 0, piece.numel);
  });
  return others;
}

}  // namespace apex_npu
