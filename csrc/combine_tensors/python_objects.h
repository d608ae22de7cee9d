// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Many objects of Python, read one after the other, prefetched as in look_at_each.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "combine_tensors/borrowed.h"
#include "combine_tensors/slot_table.h"

namespace apex_npu {

// The tensors of a list or tuple, which keeps them alive; or its items [first, last).
Borrowed borrow(const pybind11::sequence& tensors);
Borrowed borrow(const pybind11::sequence& tensors, size_t first, size_t last);

// Whether a parameter's gradient is no other's, too, and its memory is no other tensor's; names in Python do not count.
bool is_alone(const at::Tensor& grad);

// change_data_ptr for the storage that each of `lists` shares, with its values where `copy_values`; none where one is
// refused. Returns the indices of those over which there is an array outside torch, which does not follow.
std::vector<int64_t> move_storages(const pybind11::sequence& lists, const at::Tensor& src,
                                   const std::vector<int64_t>& offsets, bool copy_values);

// Whether a tensor that is in a list is held by that list alone: no name in Python, and nothing else in torch, has it.
bool is_unused(const at::Tensor& listed);

// The indices of `views`, tensors in a list, that have left their places in `table`, and of others that something else
// holds than that list and params[i] as its gradient.
std::pair<std::vector<int64_t>, std::vector<int64_t>> lost_and_kept(const SlotTable& table, const Borrowed& views,
                                                                    const Borrowed& params);

// Whether two sequences have the very same items, in order.
bool are_same(const pybind11::sequence& a, const pybind11::sequence& b);

// Whether `dict` has the very same values, in order.
bool has_values(const pybind11::dict& dict, const pybind11::list& values);

// Whether dicts[i].get(keys[i]) is values[i], the very object, for each i; no value is None.
bool hold_values(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values);

// tensor.grad, or None, for each.
pybind11::list grads_of(const Borrowed& tensors);

// tensor._version, for each; where there is None, 0.
pybind11::list versions_of(const pybind11::list& tensors);

// Whether each tensor has the very gradient of `grads`, or None, and this the version of `versions`, or 0.
bool hold_grads(const Borrowed& tensors, const pybind11::list& grads, const pybind11::list& versions);

}  // namespace apex_npu
