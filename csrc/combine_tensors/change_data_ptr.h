// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Re-points the storage of one tensor into the memory of another. apex_npu/fusion decides on the layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Raises a typed error, with the rule and the values, if change_data_ptr(dst, src, offset) is not possible. Moves
// nothing. It also works on meta tensors, so that a layout can be checked without memory.
void check_change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel);

// Makes dst's *storage* begin `offset_numel` elements after the first element of src, so that dst and all aliases of it
// use src's memory. Sizes, strides and the storage's nbytes stay. The memory is owned jointly, and lives until src and
// the last tensor that points into it are deleted. Values are not copied. The arguments must have been checked. With
// keep_previous the former memory of dst's storage stays allocated until release_previous, because something outside
// torch (an array over an alias of dst) may still point there.
void change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel, bool keep_previous);

// Copies the elements of dst's storage to the memory to which change_data_ptr(dst, src, offset) would move it.
void copy_storage(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel);

// Whether t's former memory is still kept, and the release of that memory.
bool keeps_previous(const at::Tensor& t);
void release_previous(const at::Tensor& t);

// Returns whether t's memory comes from torch's allocator, and not from another process, an array or a file.
bool allocated_by_torch(const at::Tensor& t);

// Returns a new tensor over src's memory that begins `offset_numel` elements after src's first element. Its storage has
// the size of the tensor.
at::Tensor storage_view(const at::Tensor& src, int64_t offset_numel, at::IntArrayRef sizes, at::IntArrayRef strides);

// Returns a storage_view for each of `like`, with its sizes and strides.
std::vector<at::Tensor> storage_views(const at::Tensor& src, const std::vector<int64_t>& offsets, const Borrowed& like);

// Returns whether t's memory was assigned by change_data_ptr or storage_view.
bool is_slot(const at::Tensor& t);

// The memory of a buffer that only its slots own. It is freed with the last of them.
class LentMemory {
 public:
  // Takes the memory of `src`, which has slots. Aliases of `src` must not be read until it has memory again.
  explicit LentMemory(const at::Tensor& src);

  // The number of storages of slots.
  int64_t count() const { return memory_.use_count(); }

  // Returns whether t is one of the slots.
  bool has(const at::Tensor& t) const;

  // Gives the memory back to `src`. Returns false if it has been freed.
  bool give_back(const at::Tensor& src) const;

 private:
  std::weak_ptr<c10::DataPtr> memory_;
  void* start_;
};

}  // namespace apex_npu
