// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/vectors.h"

#include <ATen/Version.h>

#include <string>

namespace apex_npu {

bool has_avx2() {
  static const bool has = at::get_cpu_capability().rfind("AVX", 0) == 0;  // AVX2 or AVX512
  return has;
}

bool has_avx512() {
  static const bool has = at::get_cpu_capability() == "AVX512";
  return has;
}

}  // namespace apex_npu
