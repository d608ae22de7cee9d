// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "data_parallel/grad_arrivals.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace apex_npu {

using torch::autograd::variable_list;

struct GradArrivals::State {
  std::function<void(int64_t)> on_full;
  std::mutex mutex;  // each device has a separate thread in backward
  bool armed = false, deferred = false;
  std::vector<int64_t> bucket_of, expected, counts, order, awaited;
  int64_t full = 0, late = -1;

  void arrived(size_t index, const at::Tensor& tensor) {
    int64_t told = -1;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!armed) return;
      const int64_t bucket = bucket_of[index];
      ++counts[index];
      order.push_back(static_cast<int64_t>(index));
      if (bucket < full) {
        late = static_cast<int64_t>(index);
        return;
      }
      // create_graph=True: gradients must not change until the block ends.
      const at::Tensor& grad = tensor.grad();
      if (grad.defined() && grad.requires_grad()) deferred = true;
      if (counts[index] == expected[index]) --awaited[bucket];
      if (deferred) return;
      const int64_t before = full;
      while (full < static_cast<int64_t>(awaited.size()) && awaited[full] == 0) ++full;
      if (full != before) told = full;
    }
    if (told >= 0) on_full(told);  // without the mutex: this waits for Python's lock, whose holder may wait for it
  }
};

namespace {

struct CountingHook : torch::autograd::FunctionPostHook {
  explicit CountingHook(std::function<void()> count) : count_(std::move(count)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    count_();
    return outputs;
  }
  std::function<void()> count_;
};

}  // namespace

GradArrivals::GradArrivals(std::vector<at::Tensor> tensors, std::function<void(int64_t)> on_full)
    : tensors_(std::move(tensors)), watched_(tensors_.size(), Watched{NodePtr(), 0}), state_(new State) {
  state_->on_full = std::move(on_full);
  state_->counts.assign(tensors_.size(), 0);
}

GradArrivals::~GradArrivals() { close(); }

void GradArrivals::plan(std::vector<int64_t> bucket_of, std::vector<int64_t> expected) {
  TORCH_CHECK_VALUE(bucket_of.size() == tensors_.size() && expected.size() == tensors_.size(),
                    "plan: expected one bucket and one count per tensor (", tensors_.size(), "), got ",
                    bucket_of.size(), " and ", expected.size());
  for (const int64_t bucket : bucket_of) TORCH_CHECK_VALUE(bucket >= 0, "plan: buckets count from 0, got ", bucket);
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->bucket_of = std::move(bucket_of);
  state_->expected = std::move(expected);
}

void GradArrivals::begin(bool deferred) {
  TORCH_CHECK(state_->bucket_of.size() == tensors_.size(), "begin: nothing has been planned; call plan before it");
  watch();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  State& state = *state_;
  state.awaited.clear();
  for (const int64_t bucket : state.bucket_of) {
    if (bucket >= static_cast<int64_t>(state.awaited.size())) state.awaited.resize(bucket + 1, 0);
    ++state.awaited[bucket];
  }
  state.counts.assign(tensors_.size(), 0);
  state.order.clear();
  state.full = 0;
  state.late = -1;
  state.deferred = deferred;
  state.armed = true;
}

// A parameter whose dtype or device has changed has a new accumulator.
void GradArrivals::watch() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& tensor = tensors_[i];
    if (!tensor.requires_grad() || tensor.grad_fn()) continue;
    NodePtr node = torch::autograd::impl::grad_accumulator(tensor);
    Watched& watched = watched_[i];
    if (node.get() == watched.node.get()) continue;
    if (watched.node) watched.node->del_post_hook(watched.key);
    const std::weak_ptr<State> weak = state_;
    auto* variable = tensor.unsafeGetTensorImpl();  // the node keeps it alive
    const auto count = [weak, i, variable] {
      if (const auto state = weak.lock()) {
        state->arrived(i, at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(variable)));
      }
    };
    watched.key = node->add_post_hook(std::make_unique<CountingHook>(count));
    watched.node = std::move(node);
  }
}

void GradArrivals::end() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->armed = false;
}

void GradArrivals::close() {
  end();
  for (Watched& watched : watched_) {
    if (watched.node) watched.node->del_post_hook(watched.key);
    watched.node = NodePtr();
  }
}

std::vector<int64_t> GradArrivals::order() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->order;
}

std::vector<int64_t> GradArrivals::counts() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->counts;
}

int64_t GradArrivals::late() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->late;
}

}  // namespace apex_npu
