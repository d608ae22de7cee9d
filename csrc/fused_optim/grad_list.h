// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients at any addresses, as one flat operand: a tensor without memory. Only the kernels here can read it, and on a
// GPU the Triton kernels that follow addresses. All other operations reject it, since it has no storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// The gradient for the elements [begin, end) of the operand.
struct ListedGrad {
  int64_t nbytes() const { return (end - begin) * static_cast<int64_t>(c10::elementSize(dtype)); }

  int64_t begin, end;
  const char* data;
  at::ScalarType dtype;
  uint32_t owner;  // index in the list's storages
};

class GradList {
 public:
  // Makes the list of an operand of `numel` elements, to which `count` gradients are added; other elements are 0. Only
  // `writable` gradients can be scaled. The kernels here read only gradients on a CPU.
  GradList(int64_t numel, size_t count, bool writable, c10::Device device = c10::kCPU);

  // Adds `grad`, which fills its memory, from element `begin` on, after all gradients that have been added.
  void add(const at::Tensor& grad, int64_t begin);

  const std::vector<ListedGrad>& places() const { return places_; }

  // Multiplies writable gradients in place, and returns whether an element is inf or nan. With a factor of 1 no
  // gradient is written.
  bool scale(double factor) const;

  // For kernels on other devices than the CPU. out[i] becomes the address of the operand if its gradient of lengths[i]
  // elements from begins[i] on were in its place, plus 1 if the gradient has another dtype than `wide`; 0 for a missing
  // or empty gradient. All are int64, on the host, in the order of the operand. Returns the other dtypes.
  std::vector<at::ScalarType> write_addresses(const at::Tensor& begins, const at::Tensor& lengths, at::ScalarType wide,
                                              const at::Tensor& out) const;

  // Returns the gradients, 1-D, each with its first element in the operand. Code that writes them must count this.
  std::vector<std::pair<at::Tensor, int64_t>> tensors() const;

  // Increments the versions of the gradients, which are writable.
  void count_writes() const;

  c10::Device device() const { return device_; }

  // Prefetches the beginning of the gradient after the one of this index. The hardware prefetcher cannot predict it,
  // because it is in other memory.
  void prefetch_behind(size_t index) const;

  // Returns elements [begin, begin + n), n <= kBlockNumel, as T: in place, or gathered in `copy`. T is double for
  // float64 gradients, else float.
  template <typename T>
  const T* read(int64_t begin, int64_t n, T* copy) const;

  // Returns the same elements in place if they are bfloat16 and of one gradient; else null.
  const BFloat16* narrow(int64_t begin, int64_t n) const;

 private:
  size_t first_behind(int64_t begin) const;

  int64_t numel_;
  bool writable_;
  c10::Device device_;
  std::vector<ListedGrad> places_;
  // The storages of the gradients, which neighbours may share. These are not tensors, because for a tensor with a
  // Python object torch takes Python's lock twice.
  std::vector<c10::Storage> owners_;
  std::vector<c10::VariableVersion> versions_;  // of writable gradients
  std::vector<uint32_t> first_in_block_;  // the first place that ends after the beginning of each kBlockNumel elements
};

// Returns the operand of wide or narrow gradients, with this dtype.
at::Tensor as_operand(GradList grads, int64_t numel, at::ScalarType dtype);

// Returns the gradients of an operand; null for any other tensor.
const GradList* grad_list_of(const at::Tensor& tensor);

// Raises TypeError for any other tensor.
const GradList& grads_in(const at::Tensor& tensor);

}  // namespace apex_npu
