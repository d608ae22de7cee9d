// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors of Python (DTensor) with a plain tensor inside: thousands of them, and their gradients, read in one pass.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fused_optim/grad_slots.h"

namespace apex_npu {

// One of a class's __slots__, read without a look-up by name or a reference.
class ObjectSlot {
 public:
  ObjectSlot(const pybind11::type& cls, const char* name);

  // Borrowed; null where it has not been set.
  PyObject* operator()(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  void set(PyObject* object, PyObject* value) const;

 private:
  pybind11::object descriptor_;
  Py_ssize_t offset_;
};

class Shards {
 public:
  // `full_params` are instances of `cls`, whose slots `_local_tensor` and `_spec` are read; parts[i] is what
  // full_params[i] has inside.
  Shards(const pybind11::type& cls, pybind11::list full_params, pybind11::list parts);

  // Whether each parameter still has its part inside.
  bool have_parts() const;

  // Holds what the gradients of the parameters have inside, until that is dropped or brought to the parts, and returns
  // one GradState for each: NONE or ELSEWHERE. Nothing is held where one cannot stay there for `in_place`, or, to be
  // written, two overlap.
  std::optional<std::string> hold_grads(const GradSlots& slots, InPlace in_place);

  // `count` of those that are held, from the one of index `first` on, as one operand; see GradSlots::grad_list.
  at::Tensor grad_list(const GradSlots& slots, size_t first, size_t count, int64_t numel) const;

  // Gives each part what the gradient of its parameter has inside, or none. Returns the indices of those, left without,
  // whose parameter has a gradient that is no `cls`, is cut in another way than that, or has a subclass inside.
  std::vector<int64_t> bring_grads();

  // The other way: the gradients of the parameters have inside what their parts have as gradient.
  void return_grads() const;

  // Drops what is held, and the gradients of the parts; with `stepped` autograd notices that the parameters of both
  // have been written.
  void drop_grads(bool stepped);

 private:
  // look(i, object) for what the gradient of each parameter has inside, a plain tensor; null where it has none.
  // look_at_other(i) for those of which bring_grads returns the indices.
  template <typename Look, typename LookAtOther>
  void look_inside(const Look& look, const LookAtOther& look_at_other) const;

  pybind11::type cls_;
  pybind11::list full_params_, parts_;
  ObjectSlot local_tensor_, spec_;
  std::vector<pybind11::object> held_;  // none, or one tensor or null for each
  bool writable_ = false;               // what is held
};

}  // namespace apex_npu
