// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Tensors of [batch, channels, ...] and what there is one of for each channel.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace host_cann {

inline std::vector<int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

// `values`, one a channel, so that they broadcast over a tensor like `like`.
inline at::Tensor by_channel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[1] = values.numel();
  return values.reshape(sizes);
}

}  // namespace host_cann
