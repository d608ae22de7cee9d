// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Device memory: who owns it, how much there is of it, and how the host looks at it.
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <mutex>
#include <new>
#include <utility>

#ifdef NPU_SIMULATOR_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include "npu.h"

namespace npu_simulator {
namespace {

struct DeviceMemory {
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> peak{0};
};
std::array<DeviceMemory, kMaxDevices> device_memory;
std::atomic<int64_t> storages_alive{0};

void reserve(c10::DeviceIndex index, int64_t nbytes) {
  DeviceMemory& memory = device_memory[index];
  const int64_t limit = settings().memory_limit.load(std::memory_order_relaxed);
  const int64_t before = memory.allocated.fetch_add(nbytes);
  if (limit >= 0 && before + nbytes > limit) {
    memory.allocated.fetch_sub(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", nbytes,
                     " bytes on npu:", static_cast<int>(index), ", of which ", before, " of ", limit,
                     " bytes are in use (simulated: npu_simulator.configure(memory_limit=", limit, "))");
  }
  int64_t peak = memory.peak.load(std::memory_order_relaxed);
  while (before + nbytes > peak && !memory.peak.compare_exchange_weak(peak, before + nbytes)) {
  }
}

void release(c10::DeviceIndex index, int64_t nbytes) noexcept { device_memory[index].allocated.fetch_sub(nbytes); }

// Written in front of the bytes, so that context and data are one pointer: torch asks for that before it shares memory
// copy-on-write. For memory that a host kernel has allocated it only holds the owner.
struct alignas(c10::gAlignment) Header {
  int64_t nbytes;
  c10::DeviceIndex index;
  bool is_adopted;
};

struct Adopted {
  c10::DataPtr data;  // one of the two
  c10::Storage storage;
};

// One deleter for both: a comparison with the allocator's deleter shows that the memory is this device's own.
void free_device_memory(void* context) {
  auto* header = static_cast<Header*>(context) - 1;
  release(header->index, header->nbytes);
  if (header->is_adopted) static_cast<Adopted*>(context)->~Adopted();
  c10::free_cpu(header);
}

void* new_adopted(c10::DataPtr data, c10::Storage storage, int64_t nbytes, c10::DeviceIndex index) {
  auto* header = new (c10::alloc_cpu(sizeof(Header) + sizeof(Adopted))) Header{nbytes, index, true};
  return new (header + 1) Adopted{std::move(data), std::move(storage)};
}

void drop_storage(void* storage) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(storage));
}

#ifdef NPU_SIMULATOR_DEVICE_ALLOCATOR
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

struct NpuAllocator final : AllocatorBase {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::DeviceIndex index = current_device();
    const c10::Device device(kNpu, index);
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    reserve(index, static_cast<int64_t>(nbytes));
    void* memory = nullptr;
    try {
      memory = c10::alloc_cpu(nbytes + sizeof(Header));
    } catch (const std::exception&) {
      release(index, static_cast<int64_t>(nbytes));
      TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", nbytes,
                       " bytes on npu:", static_cast<int>(index), ", which the host does not have");
    }
    auto* header = new (memory) Header{static_cast<int64_t>(nbytes), index, false};
    void* data = header + 1;
    return {data, data, &free_device_memory, device};
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

#ifdef NPU_SIMULATOR_DEVICE_ALLOCATOR
  // Nothing is cached and nothing runs asynchronously, so most methods of a caching allocator do nothing.
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {}
  void recordStream(const c10::DataPtr& /*data*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const MemoryFigures figures = memory_figures(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = figures.allocated;
      (*bytes)[0].peak = figures.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    const MemoryFigures figures = memory_figures(index);
    const int64_t total = figures.limit >= 0 ? figures.limit : int64_t{1} << 36;
    return {static_cast<size_t>(std::max<int64_t>(total - figures.allocated, 0)), static_cast<size_t>(total)};
  }
#endif
};

// Page-locked memory is ordinary memory that is known to be page-locked.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : c10::alloc_cpu(nbytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      blocks[data] = nbytes;
    }
    return {data, data, &PinnedAllocator::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(data);
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(data) < static_cast<const char*>(after->first) + after->second;
  }
  static void free(void* data);

  std::mutex mutex;
  std::map<const void*, size_t> blocks;
};

// Never destroyed: memory may be freed while the process ends.
NpuAllocator& allocator_instance() {
  static auto* instance = new NpuAllocator;
  return *instance;
}
PinnedAllocator& pinned_instance() {
  static auto* instance = new PinnedAllocator;
  return *instance;
}

void PinnedAllocator::free(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(pinned_instance().mutex);
    pinned_instance().blocks.erase(data);
  }
  c10::free_cpu(data);
}

c10::intrusive_ptr<c10::StorageImpl> create_storage(c10::StorageImpl::use_byte_size_t use, c10::SymInt nbytes,
                                                    c10::DataPtr data, c10::Allocator* allocator, bool resizable) {
  if (data == nullptr && data.get_context() == nullptr && data.device().is_cpu() && allocator != nullptr) {
    data = allocator->allocate(static_cast<size_t>(nbytes.as_int_unchecked()));
  }
  return c10::make_intrusive<NpuStorageImpl>(use, std::move(nbytes), std::move(data), allocator, resizable);
}

}  // namespace

NpuStorageImpl::NpuStorageImpl(use_byte_size_t use, c10::SymInt nbytes, c10::DataPtr data, c10::Allocator* allocator,
                               bool resizable)
    : c10::StorageImpl(use, std::move(nbytes), std::move(data), allocator, resizable) {
  storages_alive.fetch_add(1, std::memory_order_relaxed);
}
NpuStorageImpl::~NpuStorageImpl() { storages_alive.fetch_sub(1, std::memory_order_relaxed); }

Settings& settings() {
  static auto* instance = new Settings;
  return *instance;
}

c10::Allocator* npu_allocator() { return &allocator_instance(); }
c10::Allocator* pinned_allocator() { return &pinned_instance(); }
bool is_pinned(const void* data) { return pinned_instance().owns(data); }
int64_t live_storages() { return storages_alive.load(); }

MemoryFigures memory_figures(c10::DeviceIndex index) {
  check_device_index(index);
  return {device_memory[index].allocated.load(), device_memory[index].peak.load(), settings().memory_limit.load()};
}
void reset_peak(c10::DeviceIndex index) {
  check_device_index(index);
  device_memory[index].peak.store(device_memory[index].allocated.load());
}

void register_memory() {
  c10::SetAllocator(kNpu, npu_allocator());
  c10::SetStorageImplCreate(kNpu, &create_storage);
}

c10::Storage new_storage(int64_t nbytes, c10::DeviceIndex index) {
  DeviceGuard guard(c10::Device(kNpu, index));
  return c10::Storage(c10::make_intrusive<NpuStorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                          npu_allocator()->allocate(static_cast<size_t>(nbytes)),
                                                          npu_allocator(), /*resizable=*/true));
}

c10::DataPtr adopt(c10::DataPtr host, int64_t nbytes, c10::DeviceIndex index) {
  reserve(index, nbytes);
  void* data = host.get();
  void* context = new_adopted(std::move(host), c10::Storage(), nbytes, index);
  return {data, context, &free_device_memory, c10::Device(kNpu, index)};
}

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex index) {
  const auto nbytes = static_cast<int64_t>(host.nbytes());
  reserve(index, nbytes);
  void* data = host.unsafeGetStorageImpl()->mutable_data();
  void* context = new_adopted(c10::DataPtr(), host, nbytes, index);
  return c10::Storage(c10::make_intrusive<NpuStorageImpl>(
      c10::StorageImpl::use_byte_size_t(), nbytes,
      c10::DataPtr(data, context, &free_device_memory, c10::Device(kNpu, index)), npu_allocator(), /*resizable=*/true));
}

c10::intrusive_ptr<c10::StorageImpl> host_storage(c10::StorageImpl* npu) {
  void* data = npu->mutable_data();  // ends copy-on-write: the kernel may write
  auto keep = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(npu);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(npu->nbytes()),
      c10::DataPtr(data, keep.release(), &drop_storage, c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

at::Tensor host_alias(const at::Tensor& npu, c10::intrusive_ptr<c10::StorageImpl> storage) {
  if (!storage) storage = host_storage(npu.storage().unsafeGetStorageImpl());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU), npu.dtype());
  impl->set_sizes_and_strides(npu.sizes(), npu.strides(), npu.storage_offset());
  if (npu.is_conj()) impl->_set_conj(true);
  if (npu.is_neg()) impl->_set_neg(true);
  if (npu.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

at::Tensor npu_tensor(c10::Storage storage, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage),
                                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return at::Tensor(std::move(impl));
}

}  // namespace npu_simulator
