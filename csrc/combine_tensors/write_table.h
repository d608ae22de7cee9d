// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Remembers the version and the memory of tensors, and says in one call which have been written or replaced since.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "combine_tensors/borrowed.h"

namespace apex_npu {

// Holds no memory: its references to storages are weak. They keep other storages from being taken for these, whose
// memory an allocator may give to the next tensor.
class WriteTable {
 public:
  // Records those of `tensors` that have no entry yet: as many as there are entries are known. All others call it.
  void add(const Borrowed& tensors);

  // Records all, or those at `indices`.
  void note(const Borrowed& tensors);
  void note(const Borrowed& tensors, const std::vector<int64_t>& indices);

  // Indices of the tensors that have another version or another address than the recorded ones.
  std::vector<int64_t> written(const Borrowed& tensors);

  // Likewise, of tensors that are about to be written: increments their versions, and records them.
  std::vector<int64_t> write(const Borrowed& tensors);

  // Those that have another version.
  std::vector<int64_t> counted(const Borrowed& tensors);

  // Records the gradients of `params` instead, and increments their versions.
  void note_grads(const Borrowed& params);

  // Indices of the gradients that have been written or added since, and of those that have another address, but none
  // that are undefined now.
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
  std::vector<Storage> storages_;  // of the entries; none of gradients
};

}  // namespace apex_npu
