// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "formats.h"

#include <atomic>

#include "report.h"

namespace host_cann {
namespace {

std::atomic<bool> overflowed{false};  // any stream's work may raise it

// [..., H, W] as FRACTAL_NZ: [..., W/16, H/16, 16, 16], padded with zeros.
at::Tensor tiles_over(void* data, const aclTensor& of) {
  return at::from_blob(data, of.storage_sizes, at::TensorOptions().dtype(scalar_type(of.type)));
}

}  // namespace

bool is_tiled(aclFormat format) { return format == ACL_FORMAT_FRACTAL_NZ; }

at::Tensor from_tiles(void* data, const aclTensor& of) {
  const at::Tensor tiles = tiles_over(data, of);
  const int64_t d = tiles.dim();
  TORCH_CHECK(d >= 4 && of.sizes.size() >= 2, "FRACTAL_NZ of a tensor with fewer than two dimensions");
  at::Tensor rows = tiles.transpose(d - 4, d - 3).transpose(d - 3, d - 2);  // [..., H/16, 16, W/16, 16]
  auto padded = std::vector<int64_t>(tiles.sizes().begin(), tiles.sizes().end() - 4);
  padded.push_back(tiles.size(d - 3) * tiles.size(d - 2));
  padded.push_back(tiles.size(d - 4) * tiles.size(d - 1));
  at::Tensor dense = rows.reshape(padded);
  const int64_t h = of.sizes[of.sizes.size() - 2], w = of.sizes.back();
  return dense.narrow(-2, 0, h).narrow(-1, 0, w).reshape(of.sizes).contiguous();
}

void to_tiles(void* data, const aclTensor& of, const at::Tensor& value) {
  at::Tensor tiles = tiles_over(data, of);
  const int64_t d = tiles.dim();
  auto padded = std::vector<int64_t>(tiles.sizes().begin(), tiles.sizes().end() - 4);
  padded.push_back(tiles.size(d - 3) * tiles.size(d - 2));
  padded.push_back(tiles.size(d - 4) * tiles.size(d - 1));
  at::Tensor dense = at::zeros(padded, tiles.options());
  const int64_t h = of.sizes[of.sizes.size() - 2], w = of.sizes.back();
  auto inner = std::vector<int64_t>(padded.begin(), padded.end() - 2);
  inner.push_back(h);
  inner.push_back(w);
  dense.narrow(-2, 0, h).narrow(-1, 0, w).copy_(value.reshape(inner));
  auto split = std::vector<int64_t>(padded.begin(), padded.end() - 2);
  split.insert(split.end(), {tiles.size(d - 3), tiles.size(d - 2), tiles.size(d - 4), tiles.size(d - 1)});
  tiles.copy_(dense.reshape(split).transpose(d - 3, d - 2).transpose(d - 4, d - 3));
}

// CANN's documentation of aclrtFloatOverflowMode: an infinite result becomes the largest number of its type, NaN 0.
at::Tensor saturated(at::Tensor value) {
  if (!saturates() || !value.is_floating_point() || value.numel() == 0) return value;
  if (at::isfinite(value).all().item<bool>()) return value;
  overflowed = true;
  return at::nan_to_num(value, 0.0);
}

bool overflow_flag() { return overflowed; }
void clear_overflow_flag() { overflowed = false; }

}  // namespace host_cann
