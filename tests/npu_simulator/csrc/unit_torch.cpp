// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// One of the two files that the compiler is given; see unit_device.cpp.
#include "autocast.cpp"
#include "bindings.cpp"
#include "collectives.cpp"
