// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// What has been called, for tests to count, and what has gone wrong, for torch_npu to say.
#pragma once

#include <cstddef>
#include <string>

namespace host_cann {

void count_launch(const std::string& name, const std::string& dtypes, size_t bytes);
void count_copy(const char* direction, size_t bytes);
void count_wait(const char* on);
// Sets what aclGetRecentErrMsg() says, and prints it; returns `code`.
int fail(int code, const std::string& message);
// The same, for a call that exists in CANN and not here; its name is kept for host_cann_missing().
int not_implemented(const std::string& name);
// False where HOST_CANN_DTYPES lists data types for operator `name`, and `dtype` is not among them.
bool takes_dtype(const std::string& name, const std::string& dtype);
// HOST_CANN_SOC, or the chip that it stands for where it is not set.
const char* chip();
// Whether float16 on that chip has neither inf nor NaN.
bool saturates();

}  // namespace host_cann
