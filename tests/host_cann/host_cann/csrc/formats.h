// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Memory in tiles (FRACTAL_NZ), and arithmetic that saturates.
#pragma once

#include <ATen/ATen.h>

#include "aclnn.h"

namespace host_cann {

bool is_tiled(aclFormat format);
at::Tensor from_tiles(void* data, const aclTensor& of);  // a dense copy
void to_tiles(void* data, const aclTensor& of, const at::Tensor& value);
// On chips that have neither inf nor NaN: clamped, and the flag of the process raised. Elsewhere `value` itself.
at::Tensor saturated(at::Tensor value);
bool overflow_flag();
void clear_overflow_flag();

}  // namespace host_cann
