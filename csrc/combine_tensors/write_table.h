// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Records the versions and the memory of tensors, and finds the tensors written or replaced since, in one call.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Holds weak references to storages, which do not keep memory. They distinguish a storage from a later one to which the
// allocator has given the same memory.
class WriteTable {
 public:
  // Records the tensors without an entry, which are those after the known ones. All other methods call it.
  void add(const Borrowed& tensors);

  // Records the current state of all tensors, or of those at `indices`.
  void note(const Borrowed& tensors);
  void note(const Borrowed& tensors, const std::vector<int64_t>& indices);

  // Returns the indices of the tensors whose version or address differs from the recorded one.
  std::vector<int64_t> written(const Borrowed& tensors);

  // Returns the result of `written`, then increments the versions of the tensors and records them.
  std::vector<int64_t> write(const Borrowed& tensors);

  // Returns the indices of the tensors whose version differs from the recorded one.
  std::vector<int64_t> counted(const Borrowed& tensors);

  // Records the gradients of `params` instead, and increments their versions.
  void note_grads(const Borrowed& params);

  // Returns the indices of the gradients that have been written or added since, and of those with another address.
  // Undefined gradients are in neither list.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> changed_grads(const Borrowed& params) const;

 private:
  struct Entry {
    bool operator!=(const Entry& other) const {
      return version != other.version || address != other.address || storage != other.storage;
    }

    int64_t version;
    const void* address;
    const c10::StorageImpl* storage;
  };
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  static constexpr Entry kNoGrad = {-1, nullptr, nullptr};
  static Entry entry_of(const at::Tensor& t);

  // entries_[i] = entry_of(t).
  void record(size_t i, const at::Tensor& t);

  std::vector<Entry> entries_;
  std::vector<Storage> storages_;  // of the entries; empty for gradients
};

}  // namespace apex_npu
