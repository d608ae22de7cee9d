// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Counts the gradients that backward has accumulated into parameters, without taking the GIL for each of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace apex_npu {

// Buckets are reported in order: the first n are full.
class GradArrivals {
 public:
  // Watches `tensors` once `plan` and `begin` have been called; those that are not leaves, or not trained then, are
  // skipped. `on_full(n)`: the first n buckets are full. It is called in the thread that added the last gradient. Two
  // threads may call it at the same time and in any order. It must not keep this object alive.
  GradArrivals(std::vector<at::Tensor> tensors, std::function<void(int64_t)> on_full);
  ~GradArrivals();
  GradArrivals(const GradArrivals&) = delete;
  GradArrivals& operator=(const GradArrivals&) = delete;

  // Sets the bucket of each tensor, and how often its gradient comes, from the next `begin` on.
  void plan(std::vector<int64_t> bucket_of, std::vector<int64_t> expected);
  // Counts from 0. `deferred`: no bucket is reported as full, and no gradient is late.
  void begin(bool deferred);
  // Stops counting.
  void end();
  // Stops watching the tensors permanently.
  void close();
  // Returns the numbers of the tensors in the order in which their gradients came, once for each time.
  std::vector<int64_t> order() const;
  // Returns the number of times that the gradient of each tensor has come.
  std::vector<int64_t> counts() const;
  // Returns the last tensor whose gradient came after its bucket was reported as full, or -1.
  int64_t late() const;

 private:
  struct State;
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Watched {
    NodePtr node;
    uintptr_t key;
  };

  void watch();

  std::vector<at::Tensor> tensors_;
  std::vector<Watched> watched_;
  // Hooks hold weak references, because a graph may outlive this object.
  std::shared_ptr<State> state_;
};

}  // namespace apex_npu
