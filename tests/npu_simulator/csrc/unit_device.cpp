// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One of the two files that the compiler is given. Most of the time goes into torch's headers, which files that need
// the same ones read once together.
#include "counters.cpp"
#include "device.cpp"
#include "fallback.cpp"
#include "memory.cpp"
#include "operators.cpp"
#include "saturate.cpp"
