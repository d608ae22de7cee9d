// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// Device memory, whose addresses the host cannot read.
#pragma once

#include <cstddef>

namespace host_cann {

int device_count();
int device_of(const void* address);                        // -1: no device memory
void* readable(const void* address);                       // where the host reads device memory; others as they are
void* allocate(int device, size_t bytes);                  // nullptr: out of memory
bool deallocate(void* address);                            // false: not what allocate() has returned
bool inside_one_block(const void* address, size_t bytes);  // of memory that is allocated
size_t total_bytes(int device);
size_t free_bytes(int device);
// From now on a device refuses what would take it over `bytes`.
void limit_memory(int device, size_t bytes);

}  // namespace host_cann
