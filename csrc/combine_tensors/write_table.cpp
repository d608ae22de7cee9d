// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "combine_tensors/write_table.h"

#include <c10/util/Exception.h>

namespace apex_npu {
namespace {

void prefetch_entry(const c10::TensorImpl& impl) {
  prefetch_storage(impl);
  prefetch_counter(impl);
}

}  // namespace

WriteTable::Entry WriteTable::entry_of(const at::Tensor& t) {
  c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  // Inference tensors have no counter; a tensor subclass may have no memory.
  const c10::VariableVersion& counter = impl.version_counter();
  const int64_t version = counter.enabled() ? static_cast<int64_t>(counter.current_version()) : 0;
  if (!impl.has_storage() || impl.is_python_dispatch()) return {version, nullptr, nullptr};
  const c10::Storage& storage = impl.unsafe_storage();
  const auto* begin = static_cast<const char*>(storage.data());
  const int64_t offset = impl.storage_offset() * static_cast<int64_t>(impl.itemsize());
  return {version, begin + offset, storage.unsafeGetStorageImpl()};
}

void WriteTable::record(size_t i, const at::Tensor& t) {
  entries_[i] = entry_of(t);
  if (entries_[i].storage == storages_[i]._unsafe_get_target()) return;
  storages_[i] = entries_[i].storage == nullptr ? Storage(c10::intrusive_ptr<c10::StorageImpl>{})
                                                : t.storage().getWeakStorageImpl();
}

void WriteTable::add(const Borrowed& tensors) {
  TORCH_CHECK_VALUE(tensors.size() >= entries_.size(), "WriteTable: expected at least ", entries_.size(),
                    " tensors, got ", tensors.size());
  const size_t known = entries_.size();
  entries_.resize(tensors.size(), kNoGrad);
  storages_.resize(tensors.size(), Storage(c10::intrusive_ptr<c10::StorageImpl>{}));
  for (size_t i = known; i < tensors.size(); ++i) record(i, *tensors[i]);
}

void WriteTable::note(const Borrowed& tensors) {
  add(tensors);
  look_at_each(tensors, prefetch_entry, [&](size_t i) { record(i, *tensors[i]); });
}

void WriteTable::note(const Borrowed& tensors, const std::vector<int64_t>& indices) {
  add(tensors);
  for (const int64_t i : indices) record(static_cast<size_t>(i), *tensors.at(i));
}

std::vector<int64_t> WriteTable::written(const Borrowed& tensors) {
  add(tensors);
  std::vector<int64_t> indices;
  look_at_each(tensors, prefetch_entry, [&](size_t i) {
    if (entry_of(*tensors[i]) != entries_[i]) indices.push_back(static_cast<int64_t>(i));
  });
  return indices;
}

std::vector<int64_t> WriteTable::write(const Borrowed& tensors) {
  add(tensors);
  std::vector<int64_t> indices;
  look_at_each(tensors, prefetch_entry, [&](size_t i) {
    const Entry now = entry_of(*tensors[i]);
    if (now != entries_[i]) indices.push_back(static_cast<int64_t>(i));
    increment_version(*tensors[i]);
    record(i, *tensors[i]);
  });
  // Views of one tensor share a counter. Recording all again keeps an increment for one from counting as a write to
  // another.
  if (!indices.empty()) note(tensors);
  return indices;
}

std::vector<int64_t> WriteTable::counted(const Borrowed& tensors) {
  add(tensors);
  std::vector<int64_t> indices;
  look_at_each(tensors, prefetch_entry, [&](size_t i) {
    if (entry_of(*tensors[i]).version != entries_[i].version) indices.push_back(static_cast<int64_t>(i));
  });
  return indices;
}

void WriteTable::note_grads(const Borrowed& params) {
  entries_.assign(params.size(), kNoGrad);
  look_at_grads(params, [](const at::Tensor& grad, size_t) {
    if (grad.defined()) increment_version(grad);
  });
  // After all counters have been incremented, because gradients that are views of one tensor share a counter.
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (grad.defined()) entries_[i] = entry_of(grad);
  });
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> WriteTable::changed_grads(const Borrowed& params) const {
  TORCH_CHECK_VALUE(params.size() == entries_.size(), "WriteTable: expected ", entries_.size(), " parameters, got ",
                    params.size());
  std::vector<int64_t> written, moved;
  look_at_grads(params, [&](const at::Tensor& grad, size_t i) {
    if (!grad.defined()) return;
    const Entry now = entry_of(grad), before = entries_[i];
    if (before.version != kNoGrad.version && now.address != before.address) {
      moved.push_back(static_cast<int64_t>(i));
    } else if (now.version != before.version) {
      written.push_back(static_cast<int64_t>(i));
    }
  });
  return {std::move(written), std::move(moved)};
}

}  // namespace apex_npu
