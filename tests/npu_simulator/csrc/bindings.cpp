// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Python names for csrc; no logic.
#include <torch/csrc/utils/pybind.h>

#include "npu.h"

namespace py = pybind11;
namespace sim = npu_simulator;

namespace npu_simulator {
void bind_collectives(py::module_& m);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register", [](int device_count) {
    sim::register_device(device_count);
    sim::register_memory();
    sim::register_operators();
    sim::register_fallback();
    sim::register_autocast();
  });
  m.def("device_count", &sim::device_count);
  m.def("current_device", [] { return static_cast<int>(sim::current_device()); });
  m.def("exchange_device",
        [](int index) { return static_cast<int>(sim::exchange_device(static_cast<c10::DeviceIndex>(index))); });
  m.def("default_generator", [](int index) { return sim::default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("synchronize", &sim::count_sync);
  m.def("count_device_to_host", [](int64_t nbytes) { sim::count_device_to_host(nbytes, /*blocking=*/true); });

  m.def("configure", [](int saturate, bool fused_foreach, bool padded_format, int64_t memory_limit) {
    sim::Settings& settings = sim::settings();
    settings.saturate = static_cast<sim::Saturate>(saturate);
    settings.padded_format = padded_format;
    settings.memory_limit = memory_limit;
    sim::set_fused_foreach(fused_foreach);
  });
  m.def("settings", [] {
    sim::Settings& settings = sim::settings();
    return py::make_tuple(static_cast<int>(settings.saturate.load()), settings.fused_foreach.load(),
                          settings.padded_format.load(), settings.memory_limit.load());
  });
  m.def("fail_after", [](int64_t launches) { sim::settings().fail_after = launches; });

  m.def("totals", [] {
    const sim::Totals t = sim::totals();
    return py::make_tuple(t.launches, t.bytes, t.h2d, t.d2h, t.syncs, t.by_op);
  });
  m.def("memory", [](int index) {
    const sim::MemoryFigures f = sim::memory_figures(static_cast<c10::DeviceIndex>(index));
    return py::make_tuple(f.allocated, f.peak, f.limit);
  });
  m.def("reset_peak_memory", [](int index) { sim::reset_peak(static_cast<c10::DeviceIndex>(index)); });
  m.def("live_storages", &sim::live_storages);

  m.def("overflow_flag", [](int index) { return sim::overflow_flag(static_cast<c10::DeviceIndex>(index)); });
  m.def("clear_overflow_flag", [](int index) { sim::clear_overflow_flag(static_cast<c10::DeviceIndex>(index)); });

  m.def("storage_format", [](const at::Tensor& tensor) {
    auto* storage = dynamic_cast<sim::NpuStorageImpl*>(tensor.storage().unsafeGetStorageImpl());
    return storage == nullptr ? sim::NpuStorageImpl::kUnset : storage->format;
  });
  m.def("set_storage_format", [](const at::Tensor& tensor, int64_t format) {
    auto* storage = dynamic_cast<sim::NpuStorageImpl*>(tensor.storage().unsafeGetStorageImpl());
    TORCH_CHECK(storage != nullptr, "a private format needs a tensor on npu, got one on ", tensor.device());
    storage->format = format;
  });
  sim::bind_collectives(m);
}
