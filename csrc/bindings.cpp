// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Python names for csrc; no logic.
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
#include "fused_optim/codec_cpu.h"
#include "fused_optim/gather_cpu.h"
#include "fused_optim/grad_list.h"
#include "fused_optim/grad_slots.h"
#include "fused_optim/kernels_cpu.h"
#include "fused_optim/state_codec.h"
#include "fused_optim/zero_grads.h"

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
  m.attr("API") = 37;

  m.def("move_storages", &apex_npu::move_storages, py::arg("lists"), py::arg("src"), py::arg("offsets"),
        py::arg("copy_values"));
  m.def(
      "storage_view",
      [](const at::Tensor& src, int64_t offset, const std::vector<int64_t>& size, const std::vector<int64_t>& stride) {
        return apex_npu::storage_view(src, offset, size, stride);
      },
      py::arg("src"), py::arg("offset"), py::arg("size"), py::arg("stride"));
  m.def("storage_views", &apex_npu::storage_views, py::arg("src"), py::arg("offsets"), py::arg("like"));
  m.def("is_slot", &apex_npu::is_slot, py::arg("tensor"));
  m.def("allocated_by_torch", &apex_npu::allocated_by_torch, py::arg("tensor"));
  m.def("keeps_previous", &apex_npu::keeps_previous, py::arg("tensor"));
  m.def("release_previous", &apex_npu::release_previous, py::arg("tensor"));

  m.def("gather_cpu", &apex_npu::gather_cpu, py::arg("slots"), py::arg("grads"), py::arg("inv_scale"),
        py::arg("found_inf"), py::arg("adds") = false);
  m.def("take_grads_cpu", &apex_npu::take_grads_cpu, py::arg("params"), py::arg("slots"), py::arg("inv_scale") = 1.0,
        py::arg("found_inf") = py::none());
  // The arguments of kernels are passed by position.
  py::class_<apex_npu::Encoding>(m, "Encoding")
      .def(py::init<>())
      .def(py::init([](const std::optional<at::Tensor>& remainder, const std::vector<at::Tensor>& scales,
                       const at::Tensor& table, int64_t count, bool stochastic_param) {
             return apex_npu::Encoding(remainder, scales, table, count, stochastic_param);
           }),
           py::arg("remainder"), py::arg("scales"), py::arg("table"), py::arg("count"), py::arg("stochastic_param"));
  m.def("adadelta_", kernel("apex_npu::adadelta_", &apex_npu::adadelta_cpu));
  m.def("adagrad_", kernel("apex_npu::adagrad_", &apex_npu::adagrad_cpu));
  m.def("adam_", kernel("apex_npu::adam_", &apex_npu::adam_cpu));
  m.def("lamb_", kernel("apex_npu::lamb_", &apex_npu::lamb_cpu));
  m.def("rmsprop_", kernel("apex_npu::rmsprop_", &apex_npu::rmsprop_cpu));
  m.def("sgd_", kernel("apex_npu::sgd_", &apex_npu::sgd_cpu));
  m.def("norm", kernel("apex_npu::norm", &apex_npu::norm_cpu));
  m.def("segment_add_", kernel("apex_npu::segment_add_", &apex_npu::segment_add_cpu));
  m.def("segment_dot", kernel("apex_npu::segment_dot", &apex_npu::segment_dot_cpu));
  m.def("decode_state_cpu", &apex_npu::decode_state_cpu, py::arg("stored"), py::arg("scales"), py::arg("table"),
        py::arg("values"));
  m.def("encode_state_cpu", &apex_npu::encode_state_cpu, py::arg("values"), py::arg("stored"), py::arg("scales"),
        py::arg("table"), py::arg("count"), py::arg("index"));

  py::class_<apex_npu::SlotTable>(m, "SlotTable")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("tensors"))
      .def("broken", &apex_npu::SlotTable::broken, py::arg("tensors"));
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
      .def(py::init<const std::vector<at::Tensor>&, std::vector<int64_t>, std::optional<c10::Device>>(),
           py::arg("shapes"), py::arg("offsets"), py::arg("device"))
      .def("remember_views", &GradSlots::remember_views, py::arg("views"))
      .def(
          "states",
          [](const GradSlots& slots, const Borrowed& params, const Borrowed& views, size_t first, int in_place,
             int64_t least_numel, bool share_memory) {
            const auto access = static_cast<apex_npu::InPlace>(in_place);
            const auto found = slots.states(params, views, first, access, least_numel, share_memory);
            return std::pair(py::bytes(found.states), found.to_gather);
          },
          py::arg("params"), py::arg("views"), py::arg("first"), py::arg("in_place"), py::arg("least_numel"),
          py::arg("share_memory"))
      .def("grad_list", &GradSlots::grad_list, py::arg("params"), py::arg("first"), py::arg("numel"),
           py::arg("writable"))
      .def("unscale", &GradSlots::unscale, py::arg("params"), py::arg("views"), py::arg("factor"), py::arg("found_inf"),
           py::arg("least_numel"))
      .def(
          "addresses",
          [](const GradSlots& slots, const Borrowed& params, const Borrowed& views, size_t first,
             const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat, const at::Tensor& addresses) {
            const auto found = slots.addresses(params, views, first, chosen, flat, addresses);
            return std::make_tuple(py::bytes(found.states), found.others, found.dtype, found.views_are_free);
          },
          py::arg("params"), py::arg("views"), py::arg("first"), py::arg("chosen"), py::arg("flat"),
          py::arg("addresses"))
      .def("let_go", &GradSlots::let_go, py::arg("flat"))
      .def("take_up", &GradSlots::take_up, py::arg("params"), py::arg("flat"));
  m.def(
      "is_grad_list",
      [](const py::handle& tensor) {
        return THPVariable_Check(tensor.ptr()) && apex_npu::grad_list_of(THPVariable_Unpack(tensor.ptr())) != nullptr;
      },
      py::arg("tensor"));
  using apex_npu::grads_in;
  m.def(
      "scale_grad_list",
      [](const at::Tensor& grads, double factor, const std::optional<at::Tensor>& found_inf) {
        if (grads_in(grads).scale(factor) && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
      },
      py::arg("grads"), py::arg("factor"), py::arg("found_inf"));
  m.def(
      "grad_addresses",
      [](const at::Tensor& grads, const at::Tensor& begins, const at::Tensor& lengths, const at::Tensor& out) {
        return grads_in(grads).write_addresses(begins, lengths, grads.scalar_type(), out);
      },
      py::arg("grads"), py::arg("begins"), py::arg("lengths"), py::arg("out"));
  m.def("listed_grads", [](const at::Tensor& grads) { return grads_in(grads).tensors(); }, py::arg("grads"));
  m.def("count_grad_writes", [](const at::Tensor& grads) { grads_in(grads).count_writes(); }, py::arg("grads"));

  m.def("increment_versions", &apex_npu::increment_versions, py::arg("tensors"));
  m.def("are_zero_grads_cpu", &apex_npu::are_zero_grads_cpu, py::arg("tensors"));
  m.def("zero_grads_cpu", &apex_npu::zero_grads_cpu, py::arg("tensors"));
  m.def("any_grads", &apex_npu::any_grads, py::arg("tensors"));
  m.def("drop_grads", &apex_npu::drop_grads, py::arg("tensors"));
  m.def("set_grads", &apex_npu::set_grads, py::arg("tensors"), py::arg("grads"));
  m.def("swap_data", &apex_npu::swap_data, py::arg("params"), py::arg("sources"));
  m.def("take_written_cpu", &apex_npu::take_written_cpu, py::arg("values"), py::arg("params"));
  m.def("grads_of", &apex_npu::grads_of, py::arg("tensors"));
  m.def("lost_and_kept", &apex_npu::lost_and_kept, py::arg("table"), py::arg("views"), py::arg("params"));
  m.def("low_precision_of", &apex_npu::low_precision_of, py::arg("tensors"));
  m.def("are_same", &apex_npu::are_same, py::arg("a"), py::arg("b"));
  m.def("has_values", &apex_npu::has_values, py::arg("dict"), py::arg("values"));
  m.def("hold_values", &apex_npu::hold_values, py::arg("dicts"), py::arg("keys"), py::arg("values"));

  py::class_<apex_npu::Overlay>(m, "Overlay")
      .def(py::init<const std::string&, const std::vector<std::pair<std::string, std::string>>&>(),
           py::arg("device_type"), py::arg("table"))
      .def("destroy", &apex_npu::Overlay::destroy);

  py::class_<apex_npu::GradArrivals>(m, "GradArrivals")
      .def(py::init([](const std::vector<at::Tensor>& tensors, py::function on_full) {
             return std::make_unique<apex_npu::GradArrivals>(tensors, from_any_thread(std::move(on_full)));
           }),
           py::arg("tensors"), py::arg("on_full"))
      .def("plan", &apex_npu::GradArrivals::plan, py::arg("bucket_of"), py::arg("expected"))
      .def("begin", &apex_npu::GradArrivals::begin, py::arg("deferred"))
      .def("end", &apex_npu::GradArrivals::end)
      .def("close", &apex_npu::GradArrivals::close)
      .def_property_readonly("order", &apex_npu::GradArrivals::order)
      .def_property_readonly("counts", &apex_npu::GradArrivals::counts)
      .def_property_readonly("late", &apex_npu::GradArrivals::late);
}
