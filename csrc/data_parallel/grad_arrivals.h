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

// Buckets are reported in order: the first n are full. apex_npu/distributed/grad_arrivals.py documents the interface.
class GradArrivals {
 public:
  // `on_full(n)`: the first n buckets are full. It is called in the thread that added the last gradient. Two threads
  // may call it at the same time and in any order.
  GradArrivals(std::vector<at::Tensor> tensors, std::function<void(int64_t)> on_full);
  ~GradArrivals();
  GradArrivals(const GradArrivals&) = delete;
  GradArrivals& operator=(const GradArrivals&) = delete;

  void plan(std::vector<int64_t> bucket_of, std::vector<int64_t> expected);
  void begin(bool deferred);
  void end();
  void close();
  std::vector<int64_t> order() const;
  std::vector<int64_t> counts() const;
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
