// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reads many Python objects in sequence, with prefetching as in look_at_each.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "combine_tensors/borrowed.h"
#include "combine_tensors/slot_table.h"

namespace apex_npu {

// Returns the tensors of a list or tuple, which keeps them alive.
Borrowed borrow(const pybind11::handle& tensors);

// Returns whether no other parameter has this gradient and no other tensor has its memory. Python names do not count.
bool is_alone(const at::Tensor& grad);

// Calls change_data_ptr for the storage that each of `lists` shares, and copies values if `copy_values`. If one is
// refused, no storage moves. Returns the indices of storages with an array outside torch, which does not follow.
std::vector<int64_t> move_storages(const pybind11::sequence& lists, const at::Tensor& src,
                                   const std::vector<int64_t>& offsets, bool copy_values);

// Returns whether a list holds the only reference to a tensor, in Python and in torch.
bool is_unused(const at::Tensor& listed);

// Returns the indices of `views`, tensors in a list, that have left their places in `table`, and of other views that
// have references besides the list and the gradient of params[i].
std::pair<std::vector<int64_t>, std::vector<int64_t>> lost_and_kept(const SlotTable& table, const Borrowed& views,
                                                                    const Borrowed& params);

// Returns whether two sequences have the same objects in the same order.
bool are_same(const pybind11::sequence& a, const pybind11::sequence& b);

// Returns whether the values of `dict` are the same objects in the same order.
bool has_values(const pybind11::dict& dict, const pybind11::list& values);

// Returns whether dicts[i].get(keys[i]) is the object values[i] for each i; no value is None.
bool hold_values(const pybind11::list& dicts, const pybind11::list& keys, const pybind11::list& values);

// Returns tensor.grad, or None, for each tensor.
pybind11::list grads_of(const Borrowed& tensors);

}  // namespace apex_npu

// Lets functions with arguments of type Borrowed be bound.
template <>
struct pybind11::detail::type_caster<apex_npu::Borrowed> {
  PYBIND11_TYPE_CASTER(apex_npu::Borrowed, const_name("Sequence[Tensor]"));

  bool load(handle tensors, bool /*convert*/) {
    value = apex_npu::borrow(tensors);
    return true;
  }
};
