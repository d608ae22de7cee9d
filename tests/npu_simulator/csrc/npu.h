// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// What the parts of the simulated NPU know of each other. Device memory is host memory: a kernel of the device is the
// CPU's, run on a CPU tensor that looks at the same bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

namespace npu_simulator {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

// ---- settings ----------------------------------------------------------------------------------------------------

enum class Saturate : int { kOff = 0, kHalf = 1, kAll = 2 };

struct Settings {
  std::atomic<Saturate> saturate{Saturate::kOff};
  std::atomic<bool> fused_foreach{false};
  std::atomic<bool> padded_format{false};
  std::atomic<int64_t> memory_limit{-1};  // bytes per device; negative: none
  std::atomic<int64_t> fail_after{-1};    // launches still allowed before the one that fails; negative: none fails
};
Settings& settings();
void set_fused_foreach(bool on);  // fallback.cpp: needs the dispatcher

// ---- devices (device.cpp) ----------------------------------------------------------------------------------------

void register_device(int device_count);
int device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
void check_device_index(c10::DeviceIndex index);
at::Generator host_generator(const at::Generator& npu_generator);
at::Generator default_generator(c10::DeviceIndex index);
at::Generator default_host_generator(c10::DeviceIndex index);

class DeviceGuard {
 public:
  explicit DeviceGuard(c10::Device device)
      : previous_(exchange_device(device.has_index() ? device.index() : current_device())) {}
  ~DeviceGuard() { exchange_device(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  c10::DeviceIndex previous_;
};

// ---- memory (memory.cpp) -----------------------------------------------------------------------------------------

struct MemoryFigures {
  int64_t allocated = 0, peak = 0, limit = -1;
};
MemoryFigures memory_figures(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
int64_t live_storages();

void register_memory();
c10::Allocator* npu_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// A storage that remembers its private format, as torch_npu's do. The format outlives a change of the memory.
struct NpuStorageImpl final : c10::StorageImpl {
  NpuStorageImpl(use_byte_size_t use, c10::SymInt nbytes, c10::DataPtr data, c10::Allocator* allocator, bool resizable);
  ~NpuStorageImpl() override;
  int64_t format = kUnset;
  static constexpr int64_t kUnset = -1;
};
c10::Storage new_storage(int64_t nbytes, c10::DeviceIndex index);
// The device's from now on: host memory that a kernel allocated itself.
c10::DataPtr adopt(c10::DataPtr host, int64_t nbytes, c10::DeviceIndex index);
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index);
// Host memory over the bytes of a storage on the device, which it keeps alive.
c10::intrusive_ptr<c10::StorageImpl> host_storage(c10::StorageImpl* npu);
at::Tensor host_alias(const at::Tensor& npu, c10::intrusive_ptr<c10::StorageImpl> storage = {});
at::Tensor npu_tensor(c10::Storage storage, const at::Tensor& like);

// ---- counting (fallback.cpp) -------------------------------------------------------------------------------------

struct Totals {
  int64_t launches = 0, bytes = 0, h2d = 0, d2h = 0, syncs = 0;
  std::map<std::string, int64_t> by_op;
};
Totals totals();
void count_sync();
void count_host_to_device(int64_t nbytes, bool blocking);
void count_device_to_host(int64_t nbytes, bool blocking);
// Called before a kernel runs, so that a failing launch has changed nothing.
void count_launch(const char* name, c10::Device device, int64_t launches = 1);
void count_bytes(int64_t nbytes);
// A launch that is no operator's.
void count_named_launch(const std::string& name, c10::Device device);

// ---- saturation (saturate.cpp) -----------------------------------------------------------------------------------

// Inf becomes the largest finite value of its sign and NaN 0, which raises the device's flag.
void saturate(const at::Tensor& host, c10::DeviceIndex index);
bool saturates(c10::ScalarType dtype);
bool overflow_flag(c10::DeviceIndex index);
void clear_overflow_flag(c10::DeviceIndex index);

// ---- operators ---------------------------------------------------------------------------------------------------

void register_fallback();
void register_operators();
void register_autocast();

}  // namespace npu_simulator
