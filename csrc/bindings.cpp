// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Python names for csrc; no logic. All arguments are passed by position.
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "amp/float32_data.h"
#include "amp/overlay.h"
#include "combine_tensors/change_data_ptr.h"
#include "combine_tensors/python_objects.h"
#include "combine_tensors/slot_table.h"
#include "combine_tensors/write_table.h"
#include "data_parallel/grad_arrivals.h"
#include "fused_optim/gather_cpu.h"
#include "fused_optim/grad_list.h"
#include "fused_optim/grad_slots.h"
#include "fused_optim/kernels_cpu.h"
#include "fused_optim/state_codec.h"

namespace py = pybind11;

// Wraps `function` for C++ threads that may not hold Python's lock when they call or release it.
static std::function<void(int64_t)> from_any_thread(py::function function) {
  const std::shared_ptr<py::function> shared(new py::function(std::move(function)), [](py::function* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
  return [shared](int64_t n) {
    py::gil_scoped_acquire gil;
    try {
      (*shared)(n);
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;  // autograd's engine passes it to the waiting thread
      raised.persist();
      throw raised;
    }
  };
}

// Binds a kernel, which runs without Python's lock; profilers show it as an operator of this name.
template <typename Result, typename... Args>
static auto kernel(const char* name, Result (*function)(Args...)) {
  return [=](Args... args) {
    const py::gil_scoped_release no_gil;
    RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>());
    return function(args...);
  };
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // What apex_npu/_extension.py expects; raised whenever a signature here changes.
  m.attr("API") = 38;

  m.def("move_storages", &apex_npu::move_storages);
  m.def("storage_view", &apex_npu::storage_view);
  m.def("storage_views", &apex_npu::storage_views);
  m.def("is_slot", &apex_npu::is_slot);
  m.def("allocated_by_torch", &apex_npu::allocated_by_torch);
  m.def("keeps_previous", &apex_npu::keeps_previous);
  m.def("release_previous", &apex_npu::release_previous);

  m.def("gather_cpu", &apex_npu::gather_cpu);
  m.def("take_grads_cpu", &apex_npu::take_grads_cpu);
  py::class_<apex_npu::Encoding>(m, "Encoding")
      .def(py::init<>())
      .def(py::init([](const std::optional<at::Tensor>& remainder, const std::vector<at::Tensor>& scales,
                       const at::Tensor& table, int64_t count, bool stochastic_param) {
        return apex_npu::Encoding(remainder, scales, table, count, stochastic_param);
      }));
  m.def("adadelta_", kernel("apex_npu::adadelta_", &apex_npu::adadelta_cpu));
  m.def("adagrad_", kernel("apex_npu::adagrad_", &apex_npu::adagrad_cpu));
  m.def("adam_", kernel("apex_npu::adam_", &apex_npu::adam_cpu));
  m.def("lamb_", kernel("apex_npu::lamb_", &apex_npu::lamb_cpu));
  m.def("rmsprop_", kernel("apex_npu::rmsprop_", &apex_npu::rmsprop_cpu));
  m.def("sgd_", kernel("apex_npu::sgd_", &apex_npu::sgd_cpu));
  m.def("norm", kernel("apex_npu::norm", &apex_npu::norm_cpu));
  m.def("segment_add_", kernel("apex_npu::segment_add_", &apex_npu::segment_add_cpu));
  m.def("segment_dot", kernel("apex_npu::segment_dot", &apex_npu::segment_dot_cpu));
  m.def("decode_state_cpu", &apex_npu::decode_state_cpu);
  m.def("encode_state_cpu", &apex_npu::encode_state_cpu);

  py::class_<apex_npu::SlotTable>(m, "SlotTable")
      .def(py::init<const std::vector<at::Tensor>&>())
      .def("broken", &apex_npu::SlotTable::broken);
  using apex_npu::Borrowed;
  using apex_npu::WriteTable;
  py::class_<WriteTable>(m, "WriteTable")
      .def(py::init<>())
      .def("add", &WriteTable::add)
      .def("note", py::overload_cast<const Borrowed&>(&WriteTable::note))
      .def("note", py::overload_cast<const Borrowed&, const std::vector<int64_t>&>(&WriteTable::note))
      .def("written", &WriteTable::written)
      .def("write", &WriteTable::write)
      .def("counted", &WriteTable::counted)
      .def("note_grads", &WriteTable::note_grads)
      .def("changed_grads", &WriteTable::changed_grads);
  using apex_npu::GradSlots;
  py::class_<GradSlots>(m, "GradSlots")
      .def(py::init<const std::vector<at::Tensor>&, std::vector<int64_t>, std::optional<c10::Device>>())
      .def("remember_views", &GradSlots::remember_views)
      .def("states",
           [](const GradSlots& slots, const Borrowed& params, const Borrowed& views, size_t first, int in_place,
              int64_t least_numel, bool share_memory) {
             const auto access = static_cast<apex_npu::InPlace>(in_place);
             const auto found = slots.states(params, views, first, access, least_numel, share_memory);
             return std::pair(py::bytes(found.states), found.to_gather);
           })
      .def("grad_list", &GradSlots::grad_list)
      .def("unscale", &GradSlots::unscale)
      .def("addresses",
           [](const GradSlots& slots, const Borrowed& params, const Borrowed& views, size_t first,
              const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat, const at::Tensor& addresses) {
             const auto found = slots.addresses(params, views, first, chosen, flat, addresses);
             return std::make_tuple(py::bytes(found.states), found.others, found.dtype, found.views_are_free);
           })
      .def("let_go", &GradSlots::let_go)
      .def("take_up", &GradSlots::take_up);
  m.def("is_grad_list", [](const py::handle& tensor) {
    return THPVariable_Check(tensor.ptr()) && apex_npu::grad_list_of(THPVariable_Unpack(tensor.ptr())) != nullptr;
  });
  using apex_npu::grads_in;
  m.def("scale_grad_list", [](const at::Tensor& grads, double factor, const std::optional<at::Tensor>& found_inf) {
    if (grads_in(grads).scale(factor) && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
  });
  m.def("grad_addresses",
        [](const at::Tensor& grads, const at::Tensor& begins, const at::Tensor& lengths, const at::Tensor& out) {
          return grads_in(grads).write_addresses(begins, lengths, grads.scalar_type(), out);
        });
  m.def("listed_grads", [](const at::Tensor& grads) { return grads_in(grads).tensors(); });
  m.def("count_grad_writes", [](const at::Tensor& grads) { grads_in(grads).count_writes(); });

  m.def("increment_versions", &apex_npu::increment_versions);
  m.def("are_zero_grads_cpu", &apex_npu::are_zero_grads_cpu);
  m.def("zero_grads_cpu", &apex_npu::zero_grads_cpu);
  m.def("any_grads", &apex_npu::any_grads);
  m.def("drop_grads", &apex_npu::drop_grads);
  m.def("set_grads", &apex_npu::set_grads);
  m.def("swap_data", &apex_npu::swap_data);
  m.def("take_written_cpu", &apex_npu::take_written_cpu);
  m.def("grads_of", &apex_npu::grads_of);
  m.def("lost_and_kept", &apex_npu::lost_and_kept);
  m.def("low_precision_of", &apex_npu::low_precision_of);
  m.def("are_same", &apex_npu::are_same);
  m.def("has_values", &apex_npu::has_values);
  m.def("hold_values", &apex_npu::hold_values);

  py::class_<apex_npu::Overlay>(m, "Overlay")
      .def(py::init<const std::string&, const std::vector<std::pair<std::string, std::string>>&>())
      .def("destroy", &apex_npu::Overlay::destroy);

  py::class_<apex_npu::GradArrivals>(m, "GradArrivals")
      .def(py::init([](const std::vector<at::Tensor>& tensors, py::function on_full) {
        return std::make_unique<apex_npu::GradArrivals>(tensors, from_any_thread(std::move(on_full)));
      }))
      .def("plan", &apex_npu::GradArrivals::plan)
      .def("begin", &apex_npu::GradArrivals::begin)
      .def("end", &apex_npu::GradArrivals::end)
      .def("close", &apex_npu::GradArrivals::close)
      .def_property_readonly("order", &apex_npu::GradArrivals::order)
      .def_property_readonly("counts", &apex_npu::GradArrivals::counts)
      .def_property_readonly("late", &apex_npu::GradArrivals::late);
}
