// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Devices, streams, events and generators. All work is done when a call returns, so that a stream is a number and an
// event a time.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <utility>
#include <vector>

#if __has_include(<c10/core/DeviceCapability.h>)
#include <c10/core/DeviceCapability.h>
#endif

#include "npu.h"

namespace npu_simulator {
namespace {

int number_of_devices = 0;
std::atomic<c10::StreamId> next_stream{1};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream{};

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kNpu, exchange_device(device.has_index() ? device.index() : this_device)};
  }
  c10::Device getDevice() const override { return {kNpu, this_device}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < number_of_devices) this_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(number_of_devices); }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream_of(with_index(device), this_stream[with_index(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(with_index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    return stream_of(with_index(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto& current = this_stream[stream.device_index()];
    return stream_of(stream.device(), std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override { count_sync(); }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const { count_sync(); }

  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override { count_sync(); }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before their times are compared");
    const auto span = *static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(start);
    return std::chrono::duration<double, std::milli>(span).count();
  }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const { return {}; }
#endif

 private:
  static c10::Stream stream_of(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  static c10::Device with_index(c10::Device device) {
    return {kNpu, device.has_index() ? device.index() : this_device};
  }
};

// A generator of the device is a CPU generator under another device's name: one seed gives one stream of numbers.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator twin = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kNpu, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        twin(std::move(twin)) {}
  void set_current_seed(uint64_t seed) override { twin.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { twin.set_offset(offset); }
  uint64_t get_offset() const override { return twin.get_offset(); }
  uint64_t current_seed() const override { return twin.current_seed(); }
  uint64_t seed() override { return twin.seed(); }
  void set_state(const c10::TensorImpl& state) override { twin.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return twin.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), twin.clone()); }

  at::Generator twin;
};

std::vector<at::Generator>& default_generators() {
  static auto* generators = new std::vector<at::Generator>;
  return *generators;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  // No `override` where older torch has no such method to override.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return number_of_devices > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(number_of_devices); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? this_device : exchange_device(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    if (index < 0) index = this_device;
    check_device_index(index);
    return default_generators()[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const {
    if (index < 0) index = this_device;
    check_device_index(index);
    return at::make_generator<Generator>(index);
  }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return {kNpu, this_device}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    DeviceGuard guard(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace

int device_count() { return number_of_devices; }
c10::DeviceIndex current_device() { return this_device; }

void check_device_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < number_of_devices, "npu:", static_cast<int>(index),
              " does not exist: the index must be in [0, ", number_of_devices,
              "); npu_simulator.install(device_count=...) decides how many there are");
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  check_device_index(index);
  return std::exchange(this_device, index);
}

at::Generator host_generator(const at::Generator& generator) {
  auto* impl = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "Expected a 'npu' device type for generator but found '", generator.device(), "'");
  return impl->twin;
}

at::Generator default_generator(c10::DeviceIndex index) {
  check_device_index(index);
  return default_generators()[index];
}
at::Generator default_host_generator(c10::DeviceIndex index) { return host_generator(default_generators()[index]); }

void register_device(int device_count) {
  TORCH_CHECK_VALUE(device_count >= 1 && device_count <= kMaxDevices, "device_count must be in [1, ", kMaxDevices,
                    "], got ", device_count);
  TORCH_CHECK(
      !at::isPrivateUse1HooksRegistered(),
      "another backend has registered itself for torch's PrivateUse1 in this process, and there is room for one;"
      " start a process without it to use npu_simulator");
  number_of_devices = device_count;
  for (int index = 0; index < device_count; ++index) {
    default_generators().push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
  }
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::impl::DeviceGuardImplRegistrar registrar(kNpu, new Guard);
}

}  // namespace npu_simulator
