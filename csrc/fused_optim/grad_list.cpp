// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/grad_list.h"

#include <ATen/OpaqueTensorImpl.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "fused_optim/convert.h"
#include "fused_optim/pieces.h"
#include "fused_optim/unscale.h"
#include "prefetch.h"

namespace apex_npu {
namespace {

using Impl = at::OpaqueTensorImpl<std::shared_ptr<const GradList>>;

// Returns n elements from the i-th on as T, in place if they are T.
const double* read_grad(const ListedGrad& place, int64_t i, int64_t /*n*/, double* /*copy*/) {
  return reinterpret_cast<const double*>(place.data) + i;
}

const float* read_grad(const ListedGrad& place, int64_t i, int64_t n, float* copy) {
  if (place.dtype == at::kFloat) return reinterpret_cast<const float*>(place.data) + i;
  widen(reinterpret_cast<const uint16_t*>(place.data) + i, place.dtype, copy, n);
  return copy;
}

c10::DispatchKey key_of(c10::Device device) { return device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA; }

}  // namespace

GradList::GradList(int64_t numel, size_t count, bool writable, c10::Device device)
    : numel_(numel), writable_(writable), device_(device) {
  places_.reserve(count);
  if (device.is_cpu()) first_in_block_.reserve((numel + kBlockNumel - 1) / kBlockNumel);
}

void GradList::add(const at::Tensor& grad, int64_t begin) {
  if (grad.numel() == 0) return;
  const int64_t end = begin + grad.numel();
  TORCH_CHECK_VALUE((places_.empty() || begin >= places_.back().end) && end <= numel_,
                    "listed gradients must be added in order, within ", numel_, " elements, got [", begin, ", ", end,
                    ")");
  const auto index = static_cast<uint32_t>(places_.size());
  while (device_.is_cpu() && static_cast<int64_t>(first_in_block_.size()) * kBlockNumel < end) {
    first_in_block_.push_back(index);
  }
  const c10::Storage& storage = grad.storage();
  if (owners_.empty() || owners_.back().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
    owners_.push_back(storage);
  }
  places_.push_back({begin, end, static_cast<const char*>(grad.const_data_ptr()), grad.scalar_type(),
                     static_cast<uint32_t>(owners_.size() - 1)});
  if (writable_) versions_.push_back(grad.unsafeGetTensorImpl()->version_counter());
}

bool GradList::scale(double factor) const {
  TORCH_CHECK(factor == 1 || writable_, "scale_grad_list: these gradients are listed to be read");
  // By one thread, because copy-on-write memory gets another address at this point.
  std::vector<const char*> data(places_.size());
  Pieces pieces;
  for (size_t i = 0; i < places_.size(); ++i) {
    const ListedGrad& place = places_[i];
    const c10::Storage& owner = owners_[place.owner];
    data[i] = place.data;
    if (factor != 1) {
      const auto offset = place.data - static_cast<const char*>(owner.data());
      data[i] = static_cast<const char*>(owner.mutable_data()) + offset;
    }
    pieces.add_segment(static_cast<int64_t>(i), 0, place.end - place.begin);
  }
  std::atomic<bool> bad{false};
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    prefetch_behind(piece.segment);
    const Place place = Place(places_[piece.segment].dtype, data[piece.segment]).from(piece.begin);
    const bool found = factor == 1 ? has_nonfinite(place, piece.numel) : unscale(place, place, factor, piece.numel);
    if (found) bad.store(true, std::memory_order_relaxed);
  });
  if (factor != 1) count_writes();
  return bad;
}

void GradList::count_writes() const {
  for (const c10::VariableVersion& version : versions_) {
    if (version.enabled()) c10::VariableVersion(version).bump();
  }
}

std::vector<at::ScalarType> GradList::write_addresses(const at::Tensor& begins, const at::Tensor& lengths,
                                                      at::ScalarType wide, const at::Tensor& out) const {
  for (const at::Tensor* numbers : {&begins, &lengths, &out}) {
    TORCH_CHECK_VALUE(numbers->is_cpu() && numbers->is_contiguous() && numbers->numel() == begins.numel(),
                      "grad_addresses: expected ", begins.numel(), " numbers on the host, got ", numbers->numel());
  }
  const auto* const first = begins.const_data_ptr<int64_t>();
  const auto* const numels = lengths.const_data_ptr<int64_t>();
  auto* const addresses = out.mutable_data_ptr<int64_t>();
  std::vector<at::ScalarType> others;
  size_t listed = 0;
  for (int64_t i = 0; i < begins.numel(); ++i) {
    addresses[i] = 0;
    // A gradient without elements is not listed, and may begin at the element of the next one.
    if (numels[i] > 0 && listed < places_.size() && places_[listed].begin == first[i]) {
      const ListedGrad& place = places_[listed++];
      const auto size = static_cast<int64_t>(c10::elementSize(place.dtype));
      addresses[i] = reinterpret_cast<intptr_t>(place.data) - place.begin * size + (place.dtype != wide ? 1 : 0);
      if (place.dtype != wide && std::find(others.begin(), others.end(), place.dtype) == others.end()) {
        others.push_back(place.dtype);
      }
    }
  }
  TORCH_CHECK_VALUE(listed == places_.size(), "grad_addresses: only ", listed, " of ", places_.size(),
                    " gradients begin where slots do");
  return others;
}

std::vector<std::pair<at::Tensor, int64_t>> GradList::tensors() const {
  std::vector<std::pair<at::Tensor, int64_t>> found;
  found.reserve(places_.size());
  for (const ListedGrad& place : places_) {
    const c10::Storage& owner = owners_[place.owner];
    const auto offset =
        (place.data - static_cast<const char*>(owner.data())) / static_cast<int64_t>(c10::elementSize(place.dtype));
    at::Tensor grad = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(owner), c10::DispatchKeySet(key_of(device_)), c10::scalarTypeToTypeMeta(place.dtype));
    const int64_t numel = place.end - place.begin, stride = 1;
    grad.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(numel), at::IntArrayRef(stride), offset);
    found.emplace_back(std::move(grad), place.begin);
  }
  return found;
}

size_t GradList::first_behind(int64_t begin) const {
  const auto block = static_cast<size_t>(begin / kBlockNumel);
  if (block >= first_in_block_.size()) return places_.size();
  size_t i = first_in_block_[block];
  while (i < places_.size() && places_[i].end <= begin) ++i;
  return i;
}

void GradList::prefetch_behind(size_t index) const {
  constexpr int64_t kHeadBytes = 2048;
  if (index + 1 >= places_.size()) return;
  const ListedGrad& next = places_[index + 1];
  prefetch_bytes(next.data, std::min(kHeadBytes, next.nbytes()));
}

const BFloat16* GradList::narrow(int64_t begin, int64_t n) const {
  const size_t i = first_behind(begin);
  if (i == places_.size()) return nullptr;
  const ListedGrad& place = places_[i];
  if (begin + n + kBlockNumel > place.end) prefetch_behind(i);
  const bool fits = place.dtype == at::kBFloat16 && place.begin <= begin && begin + n <= place.end;
  return fits ? reinterpret_cast<const BFloat16*>(place.data) + (begin - place.begin) : nullptr;
}

template <typename T>
const T* GradList::read(int64_t begin, int64_t n, T* copy) const {
  size_t i = first_behind(begin);
  const int64_t end = begin + n;
  if (i < places_.size()) {
    const ListedGrad& place = places_[i];
    if (end + kBlockNumel > place.end) prefetch_behind(i);
    if (place.begin <= begin && end <= place.end) return read_grad(place, begin - place.begin, n, copy);
  }
  int64_t done = begin;
  for (; i < places_.size() && places_[i].begin < end; ++i) {
    const ListedGrad& place = places_[i];
    const int64_t from = std::max(begin, place.begin), to = std::min(end, place.end);
    std::fill(copy + (done - begin), copy + (from - begin), T(0));
    T* part = copy + (from - begin);
    const T* data = read_grad(place, from - place.begin, to - from, part);
    if (data != part) std::memcpy(part, data, (to - from) * sizeof(T));
    done = to;
  }
  std::fill(copy + (done - begin), copy + n, T(0));
  return copy;
}

template const float* GradList::read(int64_t begin, int64_t n, float* copy) const;
template const double* GradList::read(int64_t begin, int64_t n, double* copy) const;

at::Tensor as_operand(GradList grads, int64_t numel, at::ScalarType dtype) {
  const c10::Device device = grads.device();
  return at::detail::make_tensor<Impl>(c10::DispatchKeySet(key_of(device)), c10::scalarTypeToTypeMeta(dtype), device,
                                       std::make_shared<const GradList>(std::move(grads)), c10::IntArrayRef({numel}));
}

const GradList* grad_list_of(const at::Tensor& tensor) {
  const auto* impl = dynamic_cast<const Impl*>(tensor.unsafeGetTensorImpl());
  return impl == nullptr ? nullptr : impl->opaque_handle().get();
}

const GradList& grads_in(const at::Tensor& tensor) {
  const GradList* list = grad_list_of(tensor);
  TORCH_CHECK_TYPE(list != nullptr, "expected a list of gradients, got ", tensor.toString());
  return *list;
}

}  // namespace apex_npu
