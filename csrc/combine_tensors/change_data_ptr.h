// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Re-points the storage of one tensor into the memory of another. Nothing else lives here: which tensor goes where is
// decided in apex_npu/fusion, with integers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Refuses, with a typed error that names the rule and the values, what change_data_ptr(dst, src, offset) must not do.
// Moves nothing. Works on meta tensors, too, so that a layout can be checked without its memory.
void check_change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel);

// Makes dst's *storage* begin `offset_numel` elements after the first element of src, so that dst and every alias of
// it see src's memory from then on. Sizes, strides and the storage's own nbytes stay. The memory is owned jointly: it
// lives until src and the last tensor pointed into it are gone. Values are not copied. The arguments have been checked.
// With keep_previous the memory that dst's storage had stays allocated, until release_previous: for when something
// outside torch (an array over an alias of dst) may still point there.
void change_data_ptr(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel, bool keep_previous);

// Copies the elements of dst's storage to where change_data_ptr(dst, src, offset) would make it begin.
void copy_storage(const at::Tensor& dst, const at::Tensor& src, int64_t offset_numel);

// Whether t's former memory is still kept, and letting go of it.
bool keeps_previous(const at::Tensor& t);
void release_previous(const at::Tensor& t);

// True where t's memory came from torch's allocator: not shared with another process, an array or a file.
bool allocated_by_torch(const at::Tensor& t);

// A new tensor over src's memory, `offset_numel` elements after src's first, with a storage of its own size.
at::Tensor storage_view(const at::Tensor& src, int64_t offset_numel, at::IntArrayRef sizes, at::IntArrayRef strides);

// One for each of `like`, with its sizes and strides.
std::vector<at::Tensor> storage_views(const at::Tensor& src, const std::vector<int64_t>& offsets, const Borrowed& like);

// True where t's memory was handed out by change_data_ptr or storage_view.
bool is_slot(const at::Tensor& t);

// What is kept with that memory for as long as it lives; null where it was not handed out so.
std::shared_ptr<void>* memory_note(const at::Tensor& t);

// The memory of a buffer that its slots alone own: it is free as soon as the last of them is.
class LentMemory {
 public:
  // Takes its memory from `src`, of which there are slots. Aliases of `src` must not be read until it has some again.
  explicit LentMemory(const at::Tensor& src);

  // How many storages of slots there are.
  int64_t count() const { return memory_.use_count(); }

  // Whether t is one of them.
  bool has(const at::Tensor& t) const;

  // Gives it back to `src`; false where it is free.
  bool give_back(const at::Tensor& src) const;

 private:
  std::weak_ptr<void> memory_;
  void* start_;
};

}  // namespace apex_npu
