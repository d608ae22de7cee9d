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
#include "fused_optim/norm_cpu.h"
#include "fused_optim/rules_cpu.h"
#include "fused_optim/segments_cpu.h"
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

using apex_npu::borrow;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // What apex_npu/_extension.py expects; raised whenever a signature here changes.
  m.attr("API") = 36;

  m.def("move_storages", &apex_npu::move_storages, py::arg("lists"), py::arg("src"), py::arg("offsets"),
        py::arg("copy_values"));
  m.def(
      "storage_view",
      [](const at::Tensor& src, int64_t offset, const std::vector<int64_t>& size, const std::vector<int64_t>& stride) {
        return apex_npu::storage_view(src, offset, size, stride);
      },
      py::arg("src"), py::arg("offset"), py::arg("size"), py::arg("stride"));
  m.def(
      "storage_views",
      [](const at::Tensor& src, const std::vector<int64_t>& offsets, const py::sequence& like) {
        return apex_npu::storage_views(src, offsets, borrow(like));
      },
      py::arg("src"), py::arg("offsets"), py::arg("like"));
  m.def("is_slot", &apex_npu::is_slot, py::arg("tensor"));
  m.def("allocated_by_torch", &apex_npu::allocated_by_torch, py::arg("tensor"));
  m.def("keeps_previous", &apex_npu::keeps_previous, py::arg("tensor"));
  m.def("release_previous", &apex_npu::release_previous, py::arg("tensor"));

  m.def(
      "gather_cpu",
      [](const py::sequence& slots, const py::sequence& grads, double inv_scale,
         const std::optional<at::Tensor>& found_inf,
         bool adds) { apex_npu::gather_cpu(borrow(slots), borrow(grads), inv_scale, found_inf, adds); },
      py::arg("slots"), py::arg("grads"), py::arg("inv_scale"), py::arg("found_inf"), py::arg("adds") = false);
  m.def(
      "take_grads_cpu",
      [](const py::sequence& params, const py::sequence& slots, double inv_scale,
         const std::optional<at::Tensor>& found_inf) {
        return apex_npu::take_grads_cpu(borrow(params), borrow(slots), inv_scale, found_inf);
      },
      py::arg("params"), py::arg("slots"), py::arg("inv_scale") = 1.0, py::arg("found_inf") = py::none());
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
      .def(
          "broken",
          [](const apex_npu::SlotTable& table, const py::sequence& tensors) { return table.broken(borrow(tensors)); },
          py::arg("tensors"));
  using apex_npu::WriteTable;
  py::class_<WriteTable>(m, "WriteTable")
      .def(py::init<>())
      .def("add", [](WriteTable& table, const py::sequence& tensors) { table.add(borrow(tensors)); })
      .def("note", [](WriteTable& table, const py::sequence& tensors) { table.note(borrow(tensors)); })
      .def("note", [](WriteTable& table, const py::sequence& tensors,
                      const std::vector<int64_t>& indices) { table.note(borrow(tensors), indices); })
      .def("written", [](WriteTable& table, const py::sequence& tensors) { return table.written(borrow(tensors)); })
      .def("write", [](WriteTable& table, const py::sequence& tensors) { return table.write(borrow(tensors)); })
      .def("counted", [](WriteTable& table, const py::sequence& tensors) { return table.counted(borrow(tensors)); })
      .def("note_grads", [](WriteTable& table, const py::sequence& params) { table.note_grads(borrow(params)); })
      .def("changed_grads",
           [](const WriteTable& table, const py::sequence& params) { return table.changed_grads(borrow(params)); });
  py::class_<apex_npu::GradSlots>(m, "GradSlots")
      .def(py::init<const std::vector<at::Tensor>&, std::vector<int64_t>, std::optional<c10::Device>>(),
           py::arg("shapes"), py::arg("offsets"), py::arg("device"))
      .def("remember_views", &apex_npu::GradSlots::remember_views, py::arg("views"))
      .def(
          "states",
          [](const apex_npu::GradSlots& slots, const py::sequence& params, const py::sequence& views, size_t first,
             int in_place, int64_t least_numel, bool share_memory) {
            const auto found =
                slots.states(borrow(params), borrow(views), first, static_cast<apex_npu::InPlace>(in_place),
                             least_numel, share_memory ? nullptr : &apex_npu::is_alone);
            return std::pair(py::bytes(found.states), found.to_gather);
          },
          py::arg("params"), py::arg("views"), py::arg("first"), py::arg("in_place"), py::arg("least_numel"),
          py::arg("share_memory"))
      .def(
          "grad_list",
          [](apex_npu::GradSlots& slots, const py::sequence& params, size_t first, int64_t numel, bool writable) {
            return slots.grad_list(borrow(params), first, numel, writable);
          },
          py::arg("params"), py::arg("first"), py::arg("numel"), py::arg("writable"))
      .def(
          "unscale",
          [](const apex_npu::GradSlots& slots, const py::list& params, const py::list& views, double factor,
             const std::optional<at::Tensor>& found_inf, int64_t least_numel) {
            return slots.unscale(borrow(params), borrow(views), factor, found_inf, least_numel, &apex_npu::is_alone,
                                 &apex_npu::is_unused);
          },
          py::arg("params"), py::arg("views"), py::arg("factor"), py::arg("found_inf"), py::arg("least_numel"))
      .def(
          "addresses",
          [](const apex_npu::GradSlots& slots, const py::list& params, const py::list& views, size_t first, size_t last,
             const std::optional<std::vector<int64_t>>& chosen, const at::Tensor& flat, const at::Tensor& addresses) {
            const auto found = slots.addresses(borrow(params, first, last), borrow(views, first, last), first, chosen,
                                               flat, addresses, &apex_npu::is_unused);
            return std::make_tuple(py::bytes(found.states), found.others, found.dtype, found.views_are_free);
          },
          py::arg("params"), py::arg("views"), py::arg("first"), py::arg("last"), py::arg("chosen"), py::arg("flat"),
          py::arg("addresses"))
      .def("let_go", &apex_npu::GradSlots::let_go, py::arg("flat"))
      .def(
          "take_up",
          [](apex_npu::GradSlots& slots, const py::sequence& params, const at::Tensor& flat) {
            return slots.take_up(borrow(params), flat);
          },
          py::arg("params"), py::arg("flat"));
  m.def(
      "is_grad_list",
      [](const py::handle& tensor) {
        return THPVariable_Check(tensor.ptr()) && apex_npu::grad_list_of(THPVariable_Unpack(tensor.ptr())) != nullptr;
      },
      py::arg("tensor"));
  m.def("scale_grad_list", &apex_npu::scale_grad_list, py::arg("grads"), py::arg("factor"), py::arg("found_inf"));
  m.def("grad_addresses", &apex_npu::grad_addresses, py::arg("grads"), py::arg("begins"), py::arg("lengths"),
        py::arg("out"));
  m.def("listed_grads", &apex_npu::listed_grads, py::arg("grads"));
  m.def("count_grad_writes", &apex_npu::count_grad_writes, py::arg("grads"));

  m.def(
      "increment_versions", [](const py::sequence& tensors) { apex_npu::increment_versions(borrow(tensors)); },
      py::arg("tensors"));
  m.def(
      "are_zero_grads_cpu", [](const py::sequence& tensors) { return apex_npu::are_zero_grads_cpu(borrow(tensors)); },
      py::arg("tensors"));
  m.def(
      "zero_grads_cpu", [](const py::sequence& tensors) { return apex_npu::zero_grads_cpu(borrow(tensors)); },
      py::arg("tensors"));
  m.def(
      "any_grads", [](const py::sequence& tensors) { return apex_npu::any_grads(borrow(tensors)); },
      py::arg("tensors"));
  m.def("drop_grads", [](const py::sequence& tensors) { apex_npu::drop_grads(borrow(tensors)); }, py::arg("tensors"));
  m.def(
      "set_grads",
      [](const py::sequence& tensors, const py::sequence& grads) {
        apex_npu::set_grads(borrow(tensors), borrow(grads));
      },
      py::arg("tensors"), py::arg("grads"));
  m.def(
      "swap_data",
      [](const py::sequence& params, const py::sequence& sources) {
        return apex_npu::swap_data(borrow(params), borrow(sources));
      },
      py::arg("params"), py::arg("sources"));
  m.def(
      "take_written_cpu",
      [](const py::sequence& values, const py::sequence& params) {
        return apex_npu::take_written_cpu(borrow(values), borrow(params));
      },
      py::arg("values"), py::arg("params"));
  m.def(
      "grads_of", [](const py::sequence& tensors) { return apex_npu::grads_of(borrow(tensors)); }, py::arg("tensors"));
  m.def("versions_of", &apex_npu::versions_of, py::arg("tensors"));
  m.def(
      "hold_grads",
      [](const py::sequence& tensors, const py::list& grads, const py::list& versions) {
        return apex_npu::hold_grads(borrow(tensors), grads, versions);
      },
      py::arg("tensors"), py::arg("grads"), py::arg("versions"));
  m.def(
      "lost_and_kept",
      [](const apex_npu::SlotTable& table, const py::list& views, const py::list& params) {
        return apex_npu::lost_and_kept(table, borrow(views), borrow(params));
      },
      py::arg("table"), py::arg("views"), py::arg("params"));
  m.def(
      "low_precision_of", [](const py::sequence& tensors) { return apex_npu::low_precision_of(borrow(tensors)); },
      py::arg("tensors"));
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
