// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Gradients at any addresses, as one flat operand: a tensor without memory of its own, which only the kernels here can
// read, and on a GPU those of Triton that follow addresses. All other operations reject it, since it has no storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

namespace apex_npu {

// What stands for the elements [begin, end) of the operand.
struct ListedGrad {
  int64_t nbytes() const { return (end - begin) * static_cast<int64_t>(c10::elementSize(dtype)); }

  int64_t begin, end;
  const char* data;
  at::ScalarType dtype;
  uint32_t owner;  // of the list's storages
};

class GradList {
 public:
  // Of an operand of `numel` elements, which are 0 where none of `count` gradients is added. Only those that are
  // `writable` can be scaled. The kernels here read those of a CPU alone.
  GradList(int64_t numel, size_t count, bool writable, c10::Device device = c10::kCPU);

  // From element `begin` on, after all that have been added before; `grad` fills its memory.
  void add(const at::Tensor& grad, int64_t begin);

  const std::vector<ListedGrad>& places() const { return places_; }

  // See scale_grad_list.
  bool scale(double factor) const;

  // See grad_addresses.
  std::vector<at::ScalarType> write_addresses(const at::Tensor& begins, const at::Tensor& lengths, at::ScalarType wide,
                                              const at::Tensor& out) const;

  // The gradients, 1-D, each with its first element in the operand.
  std::vector<std::pair<at::Tensor, int64_t>> tensors() const;

  // Has autograd notice that the gradients, which are writable, have been written.
  void count_writes() const;

  c10::Device device() const { return device_; }

  // Fetches the beginning of the gradient after the one of this index: the hardware prefetcher cannot predict it, since
  // it does not continue the same memory.
  void prefetch_behind(size_t index) const;

  // Elements [begin, begin + n), n <= kBlockNumel, as T: in place, or gathered in `copy`. T is double where
  // the gradients are float64, else float.
  template <typename T>
  const T* read(int64_t begin, int64_t n, T* copy) const;

  // Likewise in place, where they are bfloat16 of one gradient; else null.
  const BFloat16* narrow(int64_t begin, int64_t n) const;

 private:
  size_t first_behind(int64_t begin) const;

  int64_t numel_;
  bool writable_;
  c10::Device device_;
  std::vector<ListedGrad> places_;
  // What keeps their memory: neighbours may share it. Not tensors, for each of which that has an object in Python torch
  // takes Python's lock twice.
  std::vector<c10::Storage> owners_;
  std::vector<c10::VariableVersion> versions_;  // of those that are writable
  std::vector<uint32_t> first_in_block_;  // the first place that ends after the beginning of each kBlockNumel elements
};

// The operand, of the dtype that the gradients, wide or narrow, are taken for.
at::Tensor as_operand(GradList grads, int64_t numel, at::ScalarType dtype);

// The gradients of an operand; null for any other tensor.
const GradList* grad_list_of(const at::Tensor& tensor);

// Multiplies the gradients, which are writable, in place. found_inf (float32, one element), if given, becomes 1 where
// an element is inf or nan. With a factor of 1 nothing is written.
void scale_grad_list(const at::Tensor& grads, double factor, const std::optional<at::Tensor>& found_inf);

// For kernels on another device than the CPU: out[i] becomes the address that the operand would begin at if its
// gradient of lengths[i] elements from begins[i] on were in its place, plus 1 where that has another dtype than the
// operand; 0 where there is none, or it is empty. All are int64, on the host, in the order of the operand. Returns the
// dtypes that gradients have and the operand has not.
std::vector<at::ScalarType> grad_addresses(const at::Tensor& grads, const at::Tensor& begins, const at::Tensor& lengths,
                                           const at::Tensor& out);

// The gradients of an operand, 1-D, each with its first element there; what writes them counts that.
std::vector<std::pair<at::Tensor, int64_t>> listed_grads(const at::Tensor& grads);
void count_grad_writes(const at::Tensor& grads);

}  // namespace apex_npu
