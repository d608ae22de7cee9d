// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Have the memory at work before its answer is needed.
#pragma once

#if defined(__GNUC__)  // clang's, too
#define APEX_NPU_PREFETCH(address) __builtin_prefetch(address)
#else
#define APEX_NPU_PREFETCH(address) static_cast<void>(address)
#endif
