// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The backend "hccl" of torch.distributed: gloo, on CPU tensors that look at the devices' memory.
#include <torch/csrc/utils/pybind.h>

#include "npu.h"

#ifdef NPU_SIMULATOR_C10D
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <utility>
#include <vector>
#endif

namespace py = pybind11;

namespace npu_simulator {

#ifdef NPU_SIMULATOR_C10D
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor to_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kNpu, "hccl communicates tensors on npu, got one on ", tensor.device(),
              "; move it there, or use a process group with gloo for it: init_process_group('cpu:gloo,npu:hccl')");
  TORCH_CHECK(tensor.layout() == c10::kStrided, "hccl communicates dense tensors, got layout ", tensor.layout());
  return host_alias(tensor);
}
Tensors to_host(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(to_host(tensor));
  return result;
}
TensorLists to_host(const TensorLists& lists) {
  TensorLists result;
  for (const Tensors& list : lists) result.push_back(to_host(list));
  return result;
}

// gloo's work, whose results are the npu tensors again: that is what DDP reads out of the future.
class HcclWork final : public c10d::Work {
 public:
  HcclWork(WorkPtr gloo, Tensors outputs) : gloo_(std::move(gloo)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return gloo_->isSuccess(); }
  std::exception_ptr exception() const override { return gloo_->exception(); }
  int sourceRank() const override { return gloo_->sourceRank(); }
  Tensors result() override { return outputs_; }
  void synchronize() override { gloo_->wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return gloo_->wait(timeout); }
  void abort() override { gloo_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const Tensors outputs = outputs_;
    return gloo_->getFuture()->then(
        [outputs](c10::ivalue::Future& done) {
          done.value();  // throws what gloo threw
          return c10::IValue(outputs);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  WorkPtr gloo_;
  Tensors outputs_;
};

// A work that was done when it was made: for what has to be finished on the host after gloo.
class FinishedWork final : public c10d::Work {
 public:
  explicit FinishedWork(Tensors outputs) : outputs_(std::move(outputs)) { finish(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  Tensors outputs_;
};

class HcclBackend final : public c10d::Backend {
 public:
  HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
#ifdef NPU_SIMULATOR_BACKEND_OPTIONS
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
#endif

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Tensors host = start("broadcast", tensors);
    return work(gloo_->broadcast(host, opts), tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    Tensors host = start("all_reduce", tensors);
    return reduced(opts, host, tensors, [&](const auto& o) { return gloo_->allreduce(host, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    Tensors host = start("all_reduce", tensors);
    return reduced(opts, host, tensors, [&](const auto& o) { return gloo_->allreduce_coalesced(host, o); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    Tensors host = start("reduce", tensors);
    return reduced(opts, host, tensors, [&](const auto& o) { return gloo_->reduce(host, o); });
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Tensors host = start("all_gather", inputs);
    TensorLists host_outputs = to_host(outputs);
    return work(gloo_->allgather(host_outputs, host, opts), outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    // gloo cuts the first dimension, whatever there is in it; hccl, like nccl, takes elements in their order.
    at::Tensor host = start("all_gather_into_tensor", {input})[0].reshape({-1});
    at::Tensor host_output = to_host(output).view({-1});
    return work(gloo_->_allgather_base(host_output, host, opts), {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    Tensors host = start("all_gather_into_tensor", inputs);
    Tensors host_outputs = to_host(outputs);
    return work(gloo_->allgather_into_tensor_coalesced(host_outputs, host, opts), outputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    Tensors host = start("gather", inputs);
    TensorLists host_outputs = to_host(outputs);
    return work(gloo_->gather(host_outputs, host, opts), outputs.empty() ? Tensors{} : outputs[0]);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    Tensors host = start("scatter", outputs);
    TensorLists host_inputs = to_host(inputs);
    return work(gloo_->scatter(host, host_inputs, opts), outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    Tensors host = start("reduce_scatter", outputs);
    TensorLists host_inputs = to_host(inputs);
    return reduced(opts, host, outputs, [&](const auto& o) { return gloo_->reduce_scatter(host, host_inputs, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Tensors host = start("reduce_scatter_tensor", {output});
    at::Tensor host_input = to_host(input);
    return reduced(opts, host, {output},
                   [&](const auto& o) { return gloo_->_reduce_scatter_base(host[0], host_input, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    Tensors host = start("reduce_scatter_tensor", outputs);
    Tensors host_inputs = to_host(inputs);
    return reduced(opts, host, outputs,
                   [&](const auto& o) { return gloo_->reduce_scatter_tensor_coalesced(host, host_inputs, o); });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    at::Tensor host = start("all_to_all_single", {input})[0];
    at::Tensor host_output = to_host(output);
    return work(gloo_->alltoall_base(host_output, host, output_splits, input_splits, opts), {output});
  }
  // gloo exchanges parts of one tensor only: the list is packed into one.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    Tensors host = start("all_to_all", inputs);
    Tensors host_outputs = to_host(outputs);
    std::vector<int64_t> input_splits, output_splits;
    Tensors flat;
    int64_t output_numel = 0;
    for (const at::Tensor& tensor : host) {
      flat.push_back(tensor.reshape({-1}));
      input_splits.push_back(tensor.numel());
    }
    for (const at::Tensor& tensor : host_outputs) {
      output_splits.push_back(tensor.numel());
      output_numel += tensor.numel();
    }
    at::Tensor packed = at::cat(flat);
    at::Tensor received = at::empty({output_numel}, packed.options());
    gloo_->alltoall_base(received, packed, output_splits, input_splits, opts)->wait();
    int64_t offset = 0;
    for (const at::Tensor& tensor : host_outputs) {
      tensor.copy_(received.narrow(0, offset, tensor.numel()).view_as(tensor));
      offset += tensor.numel();
    }
    return c10::make_intrusive<FinishedWork>(outputs);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    count_sync();
    return gloo_->barrier(opts);
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    Tensors host = start("send", tensors);
    return gloo_->send(host, rank, tag);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    Tensors host = start("recv", tensors);
    return gloo_->recv(host, rank, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Tensors host = start("recv", tensors);
    return gloo_->recvAnysource(host, tag);
  }

 private:
  static Tensors start(const char* name, const Tensors& tensors) {
    Tensors host = to_host(tensors);
    const c10::Device device = tensors.empty() ? c10::Device(kNpu, current_device()) : tensors[0].device();
    count_named_launch(std::string("hccl.") + name, device);
    for (const at::Tensor& tensor : tensors) count_bytes(tensor.numel() * tensor.element_size());
    return host;
  }
  static WorkPtr work(WorkPtr gloo, Tensors outputs) {
    return c10::make_intrusive<HcclWork>(std::move(gloo), std::move(outputs));
  }
  // gloo has no average: it sums, and the quotient is taken here.
  template <typename Options, typename Run>
  WorkPtr reduced(const Options& opts, Tensors& host, const Tensors& outputs, const Run& run) {
    if (opts.reduceOp != c10d::ReduceOp::AVG) return work(run(opts), outputs);
    Options sum = opts;
    sum.reduceOp = c10d::ReduceOp::SUM;
    run(sum)->wait();
    for (at::Tensor& tensor : host) tensor.div_(getSize());
    return c10::make_intrusive<FinishedWork>(outputs);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void bind_collectives(py::module_& m) {
  py::class_<HcclBackend, c10d::Backend, c10::intrusive_ptr<HcclBackend>>(m, "HcclBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::arg("gloo"), py::arg("rank"), py::arg("size"));
}

#else

void bind_collectives(py::module_& /*m*/) {}

#endif

}  // namespace npu_simulator
