// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Reads thousands of Python tensors with a plain tensor inside (DTensor), and their gradients, in one pass.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fused_optim/grad_slots.h"

namespace apex_npu {

// One of the __slots__ of a class, read without a look-up by name and without a new reference.
class ObjectSlot {
 public:
  ObjectSlot(const pybind11::type& cls, const char* name);

  // Returns a borrowed reference; null if the slot has not been set.
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
  // `full_params` are instances of `cls`, whose slots `_local_tensor` and `_spec` are read. parts[i] is the tensor
  // inside full_params[i].
  Shards(const pybind11::type& cls, pybind11::list full_params, pybind11::list parts);

  // Returns whether each parameter still has its part inside.
  bool have_parts() const;

  // Holds the tensors inside the gradients of the parameters until they are dropped or brought to the parts. Returns a
  // GradState for each: NONE or ELSEWHERE. Returns nullopt, and holds nothing, if a gradient cannot stay there for
  // `in_place`, or if gradients to write overlap.
  std::optional<std::string> hold_grads(const GradSlots& slots, InPlace in_place);

  // Returns `count` held gradients from index `first` on as one operand; see GradSlots::grad_list.
  at::Tensor grad_list(const GradSlots& slots, size_t first, size_t count, int64_t numel) const;

  // Sets the gradient of each part to the tensor inside the gradient of its parameter. Returns the indices of the parts
  // that get no gradient because the parameter's gradient is not a `cls`, is cut differently, or has a subclass inside.
  std::vector<int64_t> bring_grads();

  // The inverse: puts the gradients of the parts inside the gradients of the parameters.
  void return_grads() const;

  // Drops held gradients, and the gradients of the parts. With `stepped`, increments the versions of the parameters
  // that had them.
  void drop_grads(bool stepped);

 private:
  // Calls look(i, object) for the plain tensor inside the gradient of each parameter; null without a gradient. Calls
  // look_at_other(i) for the indices that bring_grads returns.
  template <typename Look, typename LookAtOther>
  void look_inside(const Look& look, const LookAtOther& look_at_other) const;

  pybind11::type cls_;
  pybind11::list full_params_, parts_;
  ObjectSlot local_tensor_, spec_;
  std::vector<pybind11::object> held_;  // empty, or one tensor or null for each parameter
  bool writable_ = false;               // the held gradients may be written
};

}  // namespace apex_npu
