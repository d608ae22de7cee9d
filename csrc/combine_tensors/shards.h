// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors of Python (DTensor) with a plain tensor inside: thousands of them, and their gradients, read in one pass.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace apex_npu {

class Shards {
 public:
  // `owners` are instances of `cls`, whose slots `_local_tensor` and `_spec` are read; parts[i] is what owners[i] has
  // inside.
  Shards(const pybind11::type& cls, pybind11::list owners, pybind11::list parts);

  // Whether each owner still has its part inside.
  bool have_parts() const;

  // Gives each part what the gradient of its owner has inside, or none. Returns the indices of those, left without,
  // whose owner has a gradient that is no `cls`, is cut in another way than the owner, or has a subclass inside.
  std::vector<int64_t> bring_grads() const;

  // The other way: the gradients of owners have inside what their parts have as gradient.
  void return_grads() const;

  // Drops the gradients of the parts; with `stepped` autograd notices that the owners of those have been written.
  void drop_grads(bool stepped) const;

 private:
  pybind11::type cls_;
  pybind11::list owners_, parts_;
  pybind11::object local_tensor_, spec_;  // the descriptors of the slots: no look-up by name
};

}  // namespace apex_npu
