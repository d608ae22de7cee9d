// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors of Python (DTensor) with a plain tensor inside: thousands of them, and their gradients, read in one pass.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
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
  // `owners` are instances of `cls`, whose slots `_local_tensor` and `_spec` are read; parts[i] is what owners[i] has
  // inside.
  Shards(const pybind11::type& cls, pybind11::list owners, pybind11::list parts);

  // Whether each owner still has its part inside.
  bool have_parts() const;

  // One GradState for each part, whose slot is that of the same index: kAbsent, or kLoose where what the gradient of
  // its owner has inside is loose for `loose_for`, else kForeign. Those are held until they are dropped.
  std::string look_at_grads(const GradSlots& slots, LooseFor loose_for);

  // `count` of those that are held, from the one of index `first` on, as one operand; see GradSlots::place.
  at::Tensor place(const GradSlots& slots, size_t first, size_t count, int64_t numel) const;

  // Gives each part what the gradient of its owner has inside, or none. Returns the indices of those, left without,
  // whose owner has a gradient that is no `cls`, is cut in another way than the owner, or has a subclass inside.
  std::vector<int64_t> bring_grads() const;

  // The other way: the gradients of owners have inside what their parts have as gradient.
  void return_grads() const;

  // Drops what is held, and the gradients of the parts; with `stepped` autograd notices that the owners of both have
  // been written.
  void drop_grads(bool stepped);

 private:
  // look(i, grad) for what the gradient of each owner has inside; null where it has none. look_at_other(i) for those of
  // which bring_grads returns the indices.
  template <typename Look, typename LookAtOther>
  void look_inside(const Look& look, const LookAtOther& look_at_other) const;

  pybind11::type cls_;
  pybind11::list owners_, parts_;
  ObjectSlot local_tensor_, spec_;
  std::vector<at::Tensor> held_;  // none, or one, which may be undefined, for each
};

}  // namespace apex_npu
