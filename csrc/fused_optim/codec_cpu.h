// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Decodes and encodes the states of a whole run in one pass, for rules that compute by torch's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace apex_npu {

// Computes values[i] = stored[i] for the parameters in `table` (see `encoded` in apex_npu/ops/dispatch.py), and 0
// between them. `stored` is bfloat16, or int8 or uint8 with scales; `values` is float32.
void decode_state_cpu(const at::Tensor& stored, const std::optional<at::Tensor>& scales, const at::Tensor& table,
                      const at::Tensor& values);

// The inverse, rounded by the random bits of step `count` and of the index-th state of a rule. `values` may be
// overwritten.
void encode_state_cpu(const at::Tensor& values, const at::Tensor& stored, const std::optional<at::Tensor>& scales,
                      const at::Tensor& table, int64_t count, int64_t index);

}  // namespace apex_npu
