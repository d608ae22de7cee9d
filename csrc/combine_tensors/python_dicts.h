// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many small dicts of Python, such as those in an optimizer's state.
#pragma once

#include <pybind11/pybind11.h>

namespace apex_npu {

// Whether dicts[i].get(keys[i]) is values[i], the very object, for each i; no value is None.
bool hold_values(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values);

}  // namespace apex_npu
