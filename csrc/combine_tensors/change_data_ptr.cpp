// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/change_data_ptr.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/record_stream_ops.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <utility>

#include "parallel.h"

namespace apex_npu {
namespace {

// The memory of a buffer and all its slots: the allocator's DataPtr, which the tensors that point into it own jointly.
// They own the memory rather than the source's StorageImpl, so that they stay valid if the source is resized or moved.
using SharedMemory = std::shared_ptr<c10::DataPtr>;

struct SlotContext {
  SharedMemory memory;
  // The former memory of the storage, while something outside torch (numpy, DLPack) may still reference it.
  c10::DataPtr previous;
};

void release_slot(void* context) { delete static_cast<SlotContext*>(context); }

c10::DataPtr point_at(void* start, const SharedMemory& memory, c10::Device device) {
  return c10::DataPtr(start, new SlotContext{memory, {}}, &release_slot, device);
}

SlotContext* slot_context_of(const c10::DataPtr& data_ptr) {
  if (data_ptr.get_deleter() != &release_slot) return nullptr;
  return static_cast<SlotContext*>(data_ptr.get_context());
}

// Returns the allocator's pointer for the memory that contains data_ptr. It identifies the memory to the allocator.
const c10::DataPtr& allocation_of(const c10::DataPtr& data_ptr) {
  const SlotContext* context = slot_context_of(data_ptr);
  return context == nullptr ? data_ptr : *context->memory;
}

// The allocator reuses freed memory for its own stream, which is nearly always the default one, and must be notified of
// other streams that use the memory. If fusing runs on another stream, that stream uses the former memory of
// parameters, and the default stream will use the new memory. Users cannot know this, so it is recorded here.
void record_fusing(const c10::DataPtr& allocation, bool is_new) {
  const c10::Device device = allocation.device();
  if (!device.is_cuda() && !device.is_privateuseone()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream fusing = guard.getStream(device), usual = guard.getDefaultStream(device);
  if (fusing != usual) guard.recordDataPtrOnStream(allocation, is_new ? usual : fusing);
}

// Turns sole ownership into joint ownership, once for each source; the address stays.
SharedMemory share_memory_of(const at::Tensor& src) {
  c10::StorageImpl* storage = src.storage().unsafeGetStorageImpl();
  void* start = storage->mutable_data();  // materialises a copy-on-write storage
  if (const SlotContext* context = slot_context_of(storage->data_ptr())) return context->memory;
  auto memory = std::make_shared<c10::DataPtr>();
  *memory = storage->set_data_ptr(point_at(start, memory, src.device()));
  record_fusing(*memory, true);
  return memory;
}

int64_t extent_numel(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t extent = 1;
  bool empty = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    TORCH_CHECK_VALUE(sizes[d] >= 0 && strides[d] >= 0, "sizes and strides must be >= 0, got ", sizes, " and ",
                      strides);
    empty = empty || sizes[d] == 0;
    int64_t reach = 0;
    TORCH_CHECK_VALUE(empty || (!__builtin_mul_overflow(sizes[d] - 1, strides[d], &reach) &&
                                !__builtin_add_overflow(extent, reach, &extent)),
                      "sizes ", sizes, " and strides ", strides, " reach over 2^63 elements");
  }
  return empty ? 0 : extent;
}

// The minimum number of bytes that a thread copies.
constexpr int64_t kCopyGrain = 1 << 18;

int64_t storage_numel(const at::Tensor& t) { return static_cast<int64_t>(t.storage().nbytes() / t.dtype().itemsize()); }

void check_plain(const at::Tensor& t, const char* name) {
  TORCH_CHECK_TYPE(t.defined(), "change_data_ptr: ", name, " must be a tensor, got None");
  TORCH_CHECK_TYPE(t.layout() == c10::kStrided, "change_data_ptr: ", name, " must be dense (strided), got layout ",
                   t.layout());
  TORCH_CHECK_TYPE(t.has_storage() && !t.unsafeGetTensorImpl()->is_python_dispatch(), "change_data_ptr: ", name,
                   " must be a plain tensor with memory of its own, got a tensor subclass (DTensor, FakeTensor, ...);",
                   " pass its local tensor");
  TORCH_CHECK_TYPE(!t.is_conj() && !t.is_neg(), "change_data_ptr: ", name,
                   " must not be a lazy conjugate or negative; call resolve_conj() or resolve_neg() first");
}

void check_source(const at::Tensor& src) {
  check_plain(src, "src");
  const c10::DataPtr& data_ptr = src.storage().data_ptr();
  TORCH_CHECK_VALUE(src.is_meta() || src.storage().nbytes() == 0 || data_ptr.get_context() != nullptr,
                    "change_data_ptr: src must own its memory, got memory that is only borrowed; pass src.clone()");
}

void check_range(int64_t offset_numel, int64_t need_numel, const at::Tensor& src) {
  const int64_t room_numel = extent_numel(src.sizes(), src.strides());
  TORCH_CHECK_VALUE(offset_numel >= 0, "change_data_ptr: offset must be >= 0 elements, got ", offset_numel);
  TORCH_CHECK_VALUE(offset_numel <= room_numel && need_numel <= room_numel - offset_numel,
                    "change_data_ptr: elements [", offset_numel, ", ", offset_numel + need_numel,
                    ") are outside src, which has ", room_numel, " (offset and extent count elements)");
}

void* start_of(const at::Tensor& src, int64_t offset_numel) {
  const int64_t numel = src.storage_offset() + offset_numel;
  return static_cast<char*>(src.storage().mutable_data()) + numel * static_cast<int64_t>(src.dtype().itemsize());
}

}  // namespace

void check_change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel) {
  check_plain(dst, "dst");
  check_source(src);
  TORCH_CHECK_TYPE(dst.scalar_type() == src.scalar_type(), "change_data_ptr: dst and src must have one dtype, got ",
                   dst.scalar_type(), " and ", src.scalar_type());
  TORCH_CHECK_VALUE(dst.device() == src.device(), "change_data_ptr: dst and src must be on one device, got ",
                    dst.device(), " and ", src.device());
  TORCH_CHECK_VALUE(dst.storage_offset() + extent_numel(dst.sizes(), dst.strides()) <= storage_numel(dst),
                    "change_data_ptr: dst reaches over the end of its storage: offset ", dst.storage_offset(),
                    " + extent ", extent_numel(dst.sizes(), dst.strides()), " > ", storage_numel(dst), " elements");
  check_range(offset_numel, storage_numel(dst), src);
  TORCH_CHECK_VALUE(dst.storage().unsafeGetStorageImpl() != src.storage().unsafeGetStorageImpl(),
                    "change_data_ptr: dst and src are views of one storage, which cannot be pointed into itself;"
                    " pass src.clone() or a new buffer");
  // Longer cycles cannot form, because slots own memory and not other storages.
}

void change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel, bool keep_previous) {
  if (src.is_meta()) return;  // it has no memory
  const SharedMemory memory = share_memory_of(src);
  c10::StorageImpl* storage = dst.storage().unsafeGetStorageImpl();
  record_fusing(allocation_of(storage->data_ptr()), false);
  c10::DataPtr previous = storage->set_data_ptr(point_at(start_of(src, offset_numel), memory, dst.device()));
  if (keep_previous) slot_context_of(storage->data_ptr())->previous = std::move(previous);
}

void copy_storage(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel) {
  if (src.is_meta()) return;
  if (!src.is_cpu()) {
    const std::vector<int64_t> size{storage_numel(dst)}, stride{1};
    src.as_strided(size, stride, src.storage_offset() + offset_numel).copy_(dst.as_strided(size, stride, 0));
    return;
  }
  auto* to = static_cast<char*>(start_of(src, offset_numel));
  const auto* from = static_cast<const char*>(dst.storage().data());
  parallel_for(0, static_cast<int64_t>(dst.storage().nbytes()), kCopyGrain,
               [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, end - begin); });
}

bool keeps_previous(const at::Tensor& t) {
  const SlotContext* context = slot_context_of(t.storage().data_ptr());
  return context != nullptr && static_cast<bool>(context->previous);
}

void release_previous(const at::Tensor& t) {
  SlotContext* context = slot_context_of(t.storage().data_ptr());
  if (context != nullptr) context->previous.clear();
}

bool allocated_by_torch(const at::Tensor& t) {
  const c10::DataPtr& data_ptr = t.storage().data_ptr();
  if (t.storage().nbytes() == 0 || t.is_meta() || slot_context_of(data_ptr) != nullptr) return true;
  if (c10::impl::cow::is_cow_data_ptr(data_ptr)) return true;
  const c10::Allocator* allocator = t.storage().allocator();
  if (allocator == nullptr) return false;
  return allocator->raw_deleter() == nullptr || allocator->raw_deleter() == data_ptr.get_deleter();
}

at::Tensor storage_view(const at::Tensor& src, int64_t offset_numel, at::IntArrayRef sizes, at::IntArrayRef strides) {
  check_source(src);
  TORCH_CHECK_VALUE(sizes.size() == strides.size(), "storage_view: sizes and strides must have one length, got ",
                    sizes.size(), " and ", strides.size());
  const int64_t need_numel = extent_numel(sizes, strides);
  check_range(offset_numel, need_numel, src);
  // An NPU keeps the shape in the format description of a storage, so the storage is made with the right shape.
  const at::TensorOptions options = src.options().requires_grad(false);
  at::Tensor view = src.is_privateuseone() ? at::empty_strided(sizes, strides, options) : at::empty({0}, options);
  if (!src.is_meta()) {
    const SharedMemory memory = share_memory_of(src);
    view.storage().set_data_ptr(point_at(start_of(src, offset_numel), memory, src.device()));
  }
  view.storage().set_nbytes(static_cast<size_t>(need_numel) * src.dtype().itemsize());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

std::vector<at::Tensor> storage_views(const at::Tensor& src, const std::vector<int64_t>& offsets,
                                      const Borrowed& like) {
  TORCH_CHECK_VALUE(offsets.size() == like.size(), "storage_views: expected one offset for each of ", like.size(),
                    " tensors, got ", offsets.size());
  std::vector<at::Tensor> views;
  views.reserve(like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    views.push_back(storage_view(src, offsets[i], like[i]->sizes(), like[i]->strides()));
  }
  return views;
}

LentMemory::LentMemory(const at::Tensor& src) {
  c10::StorageImpl* storage = src.storage().unsafeGetStorageImpl();
  memory_ = share_memory_of(src);
  start_ = storage->mutable_data();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, src.device()));
}

bool LentMemory::has(const at::Tensor& t) const {
  const SlotContext* context = is_slot(t) ? slot_context_of(t.storage().data_ptr()) : nullptr;
  return context != nullptr && !memory_.owner_before(context->memory) && !context->memory.owner_before(memory_);
}

bool LentMemory::give_back(const at::Tensor& src) const {
  const SharedMemory memory = memory_.lock();
  if (memory == nullptr) return false;
  src.storage().set_data_ptr_noswap(point_at(start_, memory, src.device()));
  return true;
}

bool is_slot(const at::Tensor& t) {
  return t.defined() && t.has_storage() && slot_context_of(t.storage().data_ptr()) != nullptr;
}

namespace {

// Tensor.record_stream: allocators silently ignore pointers that they have not returned, such as those of slots.
void record_stream(c10::DispatchKeySet keys, at::Tensor& self, c10::Stream stream) {
  at::_ops::record_stream::redispatch(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect), self, stream);
  if (!is_slot(self)) return;
  const c10::impl::VirtualGuardImpl guard(self.device().type());
  guard.recordDataPtrOnStream(allocation_of(self.storage().data_ptr()), stream);
}

}  // namespace

// Runs before every device's kernel, also before kernels that are registered later.
TORCH_LIBRARY_IMPL(aten, BackendSelect, m) { m.impl("record_stream", TORCH_FN(record_stream)); }

}  // namespace apex_npu
