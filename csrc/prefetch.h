// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Prefetches memory before it is read.
#pragma once

#if defined(__GNUC__)  // clang defines it, too
#define APEX_NPU_PREFETCH(address) __builtin_prefetch(address)
#else
#define APEX_NPU_PREFETCH(address) static_cast<void>(address)
#endif

#include <cstddef>

namespace apex_npu {

// Prefetches the beginning of memory that does not follow what is being read. The last byte may be in one cache line
// more than the steps reach.
inline void prefetch_bytes(const void* begin, size_t count) {
  for (size_t i = 0; i + 1 < count; i += 64) APEX_NPU_PREFETCH(static_cast<const char*>(begin) + i);
  APEX_NPU_PREFETCH(static_cast<const char*>(begin) + count - 1);
}

}  // namespace apex_npu
