// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many objects of Python, read one after the other, prefetched as in look_at_each.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// The tensors of a list or tuple, which keeps them alive.
Borrowed borrow(const pybind11::sequence& tensors);

// Whether a parameter's gradient is no other's, too, and its memory is no other tensor's; names in Python do not count.
bool is_alone(const at::Tensor& grad);

// Whether a tensor that is in a list is held by that list alone: no name in Python, and nothing else in torch, has it.
bool is_unused(const at::Tensor& listed);

// The indices of `views`, tensors in a list, that something else holds than that list and params[i] as its gradient.
std::vector<int64_t> kept_grads(const Borrowed& views, const Borrowed& params);

// Whether two sequences have the very same items, in order.
bool are_same(const pybind11::sequence& a, const pybind11::sequence& b);

// Whether dicts[i].get(keys[i]) is values[i], the very object, for each i; no value is None.
bool hold_values(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values);

// tensor.grad, or None, for each.
pybind11::list grads_of(const Borrowed& tensors);

// tensor._version, for each; where there is None, 0.
pybind11::list versions_of(const pybind11::list& tensors);

}  // namespace apex_npu
