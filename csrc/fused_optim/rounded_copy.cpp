// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/rounded_copy.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/convert.h"
#include "parallel.h"

namespace apex_npu {
namespace {

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// One for each line, never 0. Words are weighted with their place, since scripts permute and exchange them.
struct Checksums {
  APEX_NPU_INLINE void operator()(const uint16_t* words, uint32_t* sums, int64_t lines) const {
    for (int64_t line = 0; line < lines; ++line) sums[line] = of_line(words + line * kLineNumel, kLineNumel);
  }

  static APEX_NPU_INLINE uint32_t of_line(const uint16_t* words, int64_t n) {
    uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
      // The shift keeps the changes of negated elements, multiples of 0x8000 each, from adding up to 0.
      const uint32_t product = (words[i] + 1u) * (static_cast<uint32_t>(i) * 0x9e3779b1u + 0x85ebca6bu);
      sum += product ^ (product >> 15);
    }
    return sum | 1u;
  }
};

float widened(uint16_t word, c10::ScalarType dtype) {
  return dtype == at::kBFloat16 ? to_float(BFloat16{word}) : from_half(word);
}

// Pairs that this computes: others have a layout, a device or a dtype of their own.
bool is_pair(const at::Tensor& param, const at::Tensor& copy) {
  const auto is_plain = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && t.device().is_cpu() && t.has_storage() &&
           !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_neg() && !t.is_conj() &&
           t.is_non_overlapping_and_dense();
  };
  return is_plain(param) && is_plain(copy) && param.scalar_type() == at::kFloat &&
         is_low_precision(copy.scalar_type()) && param.sizes() == copy.sizes() && param.strides() == copy.strides();
}

}  // namespace

RoundedCopy::RoundedCopy(int64_t numel, c10::ScalarType dtype, const void* base, std::vector<bool> lines)
    : numel_(numel),
      dtype_(dtype),
      base_(base),
      lines_(std::move(lines)),
      checksums_((numel + kLineNumel - 1) / kLineNumel) {}

void RoundedCopy::take(float* param, const uint16_t* copy, int64_t begin, int64_t n) {
  uint16_t rounded[kBlockNumel];
  narrow(param, rounded, dtype_, n);
  if (std::memcmp(rounded, copy, n * sizeof(uint16_t)) != 0) take_different(param, copy, rounded, begin, n);
}

void RoundedCopy::take_different(float* param, const uint16_t* copy, const uint16_t* rounded, int64_t begin,
                                 int64_t n) {
  int64_t of_copies = 0, of_params = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rounded[i] == copy[i]) continue;
    const int64_t line = (begin + i) / kLineNumel;
    const uint32_t known = checksums_[line];
    if (known == 0 || (!lines_.empty() && !lines_[line])) continue;
    const float value = widened(copy[i], dtype_);
    if (value != value && param[i] != param[i]) continue;  // of what is not a number there are many words
    const int64_t first = line * kLineNumel - begin, numel = std::min(kLineNumel, numel_ - line * kLineNumel);
    const bool copy_is_written = known != Checksums::of_line(copy + first, numel);
    if (copy_is_written) {
      ++of_copies;
      param[i] = value;
      // The padding of a slot is in the copy alone.
      uint16_t words[kLineNumel];
      std::copy_n(copy + first, numel, words);
      std::copy_n(rounded + first, std::min(numel, n - first), words);
      of_params += known != Checksums::of_line(words, numel);
    } else {
      ++of_params;
    }
  }
  if (of_copies != 0) copies_written_ += of_copies;
  if (of_params != 0) params_written_ += of_params;
}

uint32_t RoundedCopy::checksum_of(const uint16_t* words, int64_t line) const {
  return Checksums::of_line(words, std::min(kLineNumel, numel_ - line * kLineNumel));
}

void RoundedCopy::write(const float* param, uint16_t* copy, int64_t begin, int64_t n) {
  narrow(param, copy, dtype_, n);
  const int64_t first = begin / kLineNumel, whole = n / kLineNumel;
  vectorized(Checksums(), static_cast<const uint16_t*>(copy), checksums_.data() + first, whole);
  // The rest of a line is padding, or outside of the buffer.
  if (n % kLineNumel != 0) checksums_[first + whole] = checksum_of(copy + whole * kLineNumel, first + whole);
}

template <typename Work>
void RoundedCopy::for_each_block(int64_t numel, const Work& work) {
  const int64_t blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  parallel_for(0, blocks, kGrainNumel / kBlockNumel, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) work(i * kBlockNumel, std::min(kBlockNumel, numel - i * kBlockNumel));
  });
}

void RoundedCopy::take_and_write(float* param, uint16_t* copy) {
  for_each_block(numel_, [&](int64_t begin, int64_t n) {
    take(param + begin, copy + begin, begin, n);
    write(param + begin, copy + begin, begin, n);
  });
}

void RoundedCopy::take_all(float* param, const uint16_t* copy, int64_t begin, int64_t n) {
  for_each_block(n, [&](int64_t i, int64_t count) { take(param + i, copy + i, begin + i, count); });
}

std::pair<int64_t, int64_t> RoundedCopy::counts() { return {copies_written_.exchange(0), params_written_.exchange(0)}; }

void RoundedCopy::write_all(const float* param, uint16_t* copy) {
  for_each_block(numel_, [&](int64_t begin, int64_t n) { write(param + begin, copy + begin, begin, n); });
}

bool RoundedCopy::copy_is_written(const uint16_t* copy, int64_t begin, int64_t n) const {
  for (int64_t i = 0; i < n; i += kLineNumel) {
    const int64_t line = (begin + i) / kLineNumel;
    if (checksums_[line] != 0 && checksums_[line] != checksum_of(copy + i, line)) return true;
  }
  return false;
}

bool RoundedCopy::param_is_written(const float* param, const uint16_t* copy, int64_t begin, int64_t n) const {
  uint16_t rounded[kLineNumel];
  narrow(param, rounded, dtype_, n);
  const int64_t line = begin / kLineNumel;
  if (std::memcmp(rounded, copy, n * sizeof(uint16_t)) == 0 || checksums_[line] != checksum_of(copy, line))
    return false;
  for (int64_t i = 0; i < n; ++i) {
    if (rounded[i] != copy[i] && (param[i] == param[i] || !std::isnan(widened(copy[i], dtype_)))) return true;
  }
  return false;
}

bool RoundedCopy::is_known(int64_t begin, int64_t n) const {
  for (int64_t line = begin / kLineNumel; line * kLineNumel < begin + n; ++line) {
    if (checksums_[line] == 0 || (!lines_.empty() && !lines_[line])) return false;
  }
  return true;
}

int64_t RoundedCopy::whole_lines(int64_t begin, int64_t n) const {
  return std::min(numel_ - begin, (n + kLineNumel - 1) / kLineNumel * kLineNumel);
}

void RoundedCopy::note(const uint16_t* copy, int64_t begin, int64_t n) {
  for (int64_t i = 0; i < n; i += kLineNumel) {
    const int64_t line = (begin + i) / kLineNumel;
    checksums_[line] = checksum_of(copy + i, line);
  }
}

bool RoundedCopy::is_of(const at::Tensor& copy) const { return copy.const_data_ptr() == base_ && is_like(copy); }

bool RoundedCopy::is_like(const at::Tensor& copy) const {
  return copy.numel() == numel_ && copy.scalar_type() == dtype_;
}

int64_t RoundedCopy::offset_of(const void* address, int64_t n) const {
  const int64_t offset = static_cast<const uint16_t*>(address) - static_cast<const uint16_t*>(base_);
  return 0 <= offset && offset <= numel_ - n ? offset : -1;
}

void watch_copies(const at::Tensor& flat, const std::vector<int64_t>& offsets, const std::vector<int64_t>& numels) {
  std::shared_ptr<void>* note = memory_note(flat);
  if (note == nullptr || !flat.device().is_cpu() || !is_low_precision(flat.scalar_type())) return;
  std::vector<bool> lines((flat.numel() + kLineNumel - 1) / kLineNumel);
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t first = offsets[i] / kLineNumel, last = (offsets[i] + numels.at(i) + kLineNumel - 1) / kLineNumel;
    TORCH_CHECK_VALUE(0 <= first && last <= static_cast<int64_t>(lines.size()), "watch_copies: copy ", i,
                      " is outside of the buffer");
    std::fill(lines.begin() + first, lines.begin() + last, true);
  }
  *note = std::make_shared<RoundedCopy>(flat.numel(), flat.scalar_type(), flat.const_data_ptr(), std::move(lines));
}

RoundedCopy* rounded_copy_of(const at::Tensor& tensor) {
  const std::shared_ptr<void>* note = memory_note(tensor);
  auto* copy = note == nullptr ? nullptr : static_cast<RoundedCopy*>(note->get());
  return copy != nullptr && copy->offset_of(tensor.const_data_ptr(), tensor.numel()) >= 0 ? copy : nullptr;
}

bool round_to_copies(const at::Tensor& params, const at::Tensor& flat) {
  RoundedCopy* copy = rounded_copy_of(flat);
  if (copy == nullptr || !is_pair(params, flat) || !params.is_contiguous()) return false;
  copy->take_and_write(params.mutable_data_ptr<float>(), static_cast<uint16_t*>(flat.mutable_data_ptr()));
  return true;
}

std::pair<int64_t, int64_t> written_copies(const at::Tensor& flat) {
  RoundedCopy* copy = rounded_copy_of(flat);
  return copy == nullptr ? std::pair<int64_t, int64_t>() : copy->counts();
}

RoundedCopy* RoundedCopies::find(const at::Tensor& param, const at::Tensor& copy) {
  if (!is_pair(param, copy)) return nullptr;
  std::unique_ptr<RoundedCopy>& found = each_[copy.unsafeGetTensorImpl()];
  if (found == nullptr || !found->is_of(copy)) {
    found = std::make_unique<RoundedCopy>(copy.numel(), copy.scalar_type(), copy.const_data_ptr());
  }
  return found.get();
}

RoundedCopies::Written RoundedCopies::take(const Borrowed& params, const Borrowed& copies) {
  Written written;
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const at::Tensor &param = *params.at(i), &tensor = *copies[i];
    RoundedCopy* copy = is_pair(param, tensor) ? known(tensor) : nullptr;
    if (copy == nullptr) {
      written.others.push_back(index);
      continue;
    }
    const auto* words = static_cast<const uint16_t*>(tensor.const_data_ptr());
    copy->take_all(param.mutable_data_ptr<float>(), words, copy->offset_of(words, tensor.numel()), tensor.numel());
    const auto [of_copy, of_param] = copy->counts();
    if (of_copy != 0) written.copies.push_back(index);
    if (of_param != 0) written.params.push_back(index);
  }
  return written;
}

std::vector<int64_t> RoundedCopies::write(const Borrowed& params, const Borrowed& copies) {
  if (each_.size() > copies.size()) each_.clear();  // some are no more
  std::vector<int64_t> others;
  for (size_t i = 0; i < copies.size(); ++i) {
    RoundedCopy* copy = find(*params.at(i), *copies[i]);
    if (copy != nullptr) {
      copy->write_all(params[i]->const_data_ptr<float>(), static_cast<uint16_t*>(copies[i]->mutable_data_ptr()));
    } else {
      others.push_back(static_cast<int64_t>(i));
    }
  }
  return others;
}

RoundedCopy* RoundedCopies::known(const at::Tensor& copy) const {
  RoundedCopy* watched = rounded_copy_of(copy);
  if (watched != nullptr) return watched;
  const auto found = each_.find(copy.unsafeGetTensorImpl());
  return found != each_.end() && found->second->is_of(copy) ? found->second.get() : nullptr;
}

void RoundedCopies::note(const Borrowed& params, const Borrowed& copies) {
  for (size_t i = 0; i < copies.size(); ++i) {
    const at::Tensor& tensor = *copies[i];
    if (!is_pair(*params.at(i), tensor)) continue;
    RoundedCopy* copy = known(tensor);
    if (copy == nullptr) copy = find(*params[i], tensor);
    const void* address = tensor.const_data_ptr();
    copy->note(static_cast<const uint16_t*>(address), copy->offset_of(address, tensor.numel()), tensor.numel());
  }
}

std::vector<int64_t> RoundedCopies::written_params(const Borrowed& params, const Borrowed& copies) const {
  std::vector<int64_t> written;
  for (size_t i = 0; i < copies.size(); ++i) {
    const int64_t numel = copies[i]->numel();
    for (int64_t begin = 0; begin < numel; begin += kLineNumel) {
      if (!param_is_written(*params.at(i), *copies[i], begin)) continue;
      written.push_back(static_cast<int64_t>(i));
      break;
    }
  }
  return written;
}

std::vector<int64_t> RoundedCopies::written_copies(const Borrowed& copies) const {
  std::vector<int64_t> written;
  for (size_t i = 0; i < copies.size(); ++i) {
    const at::Tensor& tensor = *copies[i];
    if (!tensor.device().is_cpu() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) continue;
    const RoundedCopy* copy = known(tensor);
    if (copy == nullptr) continue;
    const auto* words = static_cast<const uint16_t*>(tensor.const_data_ptr());
    if (copy->copy_is_written(words, copy->offset_of(words, tensor.numel()), tensor.numel())) {
      written.push_back(static_cast<int64_t>(i));
    }
  }
  return written;
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> RoundedCopies::since(const Borrowed& params,
                                                                           const Borrowed& copies,
                                                                           const Borrowed& places) const {
  std::vector<int64_t> same_copies, other_params;
  for (size_t i = 0; i < copies.size(); ++i) {
    const at::Tensor &param = *params.at(i), &tensor = *copies[i];
    if (!is_pair(param, tensor)) continue;
    const at::Tensor* place = places.at(i);
    const RoundedCopy* copy = known(*place);
    const int64_t n = tensor.numel();
    int64_t begin = 0;
    if (copy != nullptr) {
      begin = copy->offset_of(place->const_data_ptr(), n);
    } else {
      const auto found = each_.find(tensor.unsafeGetTensorImpl());
      if (found == each_.end() || !found->second->is_like(tensor)) continue;
      copy = found->second.get();
      place = &tensor;
    }
    if (!copy->is_known(begin, n)) continue;
    const auto* last = static_cast<const uint16_t*>(place->const_data_ptr());
    const auto index = static_cast<int64_t>(i);
    // A slot's padding is at its place alone.
    std::vector<uint16_t> words(last, last + copy->whole_lines(begin, n));
    std::memcpy(words.data(), tensor.const_data_ptr(), n * sizeof(uint16_t));
    if (!copy->copy_is_written(words.data(), begin, n)) same_copies.push_back(index);
    narrow(param.const_data_ptr<float>(), words.data(), tensor.scalar_type(), n);
    if (copy->copy_is_written(words.data(), begin, n)) other_params.push_back(index);
  }
  return {std::move(same_copies), std::move(other_params)};
}

bool RoundedCopies::glance(const Borrowed& params, const Borrowed& copies) const {
  constexpr size_t kPairs = 64;
  const size_t step = copies.size() / kPairs + 1;
  for (size_t i = 0; i < copies.size(); i += step) {
    const int64_t middle = copies[i]->numel() / 2 / kLineNumel * kLineNumel;
    for (const int64_t begin : {int64_t{0}, middle}) {
      if (param_is_written(*params.at(i), *copies[i], begin)) return true;
    }
  }
  return false;
}

bool RoundedCopies::param_is_written(const at::Tensor& param, const at::Tensor& tensor, int64_t begin) const {
  const RoundedCopy* copy = is_pair(param, tensor) ? known(tensor) : nullptr;
  if (copy == nullptr) return false;
  const auto* words = static_cast<const uint16_t*>(tensor.const_data_ptr());
  const int64_t n = std::min(kLineNumel, tensor.numel() - begin), offset = copy->offset_of(words, tensor.numel());
  return copy->param_is_written(param.const_data_ptr<float>() + begin, words + begin, offset + begin, n);
}

}  // namespace apex_npu
