// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "amp/float32_data.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"
#include "parallel.h"

namespace apex_npu {

std::vector<at::Tensor> swap_data(const Borrowed& params, const Borrowed& sources) {
  TORCH_CHECK_VALUE(params.size() == sources.size(), "swap_data: expected one source for each of ", params.size(),
                    " parameters, got ", sources.size());
  std::vector<at::Tensor> former;
  former.reserve(params.size());
  look_at_each(params, prefetch_storage, [&](size_t i) {
    c10::TensorImpl* impl = params[i]->unsafeGetTensorImpl();
    TORCH_CHECK_TYPE(impl->has_compatible_shallow_copy_type(sources[i]->key_set()), "swap_data: parameter ", i,
                     " cannot take the data of another kind of tensor");
    former.emplace_back(impl->shallow_copy_and_detach(c10::VariableVersion(0), true));
  });
  look_at_each(params, prefetch_storage,
               [&](size_t i) { params[i]->unsafeGetTensorImpl()->shallow_copy_from(sources[i]->getIntrusivePtr()); });
  return former;
}

namespace {

// Does take_written_cpu for at most kBlockNumel elements.
void take_block(float* values, const uint16_t* words, c10::ScalarType dtype, int64_t n) {
  uint16_t rounded[kBlockNumel];
  narrow(values, rounded, dtype, n);
  if (std::equal(rounded, rounded + n, words)) return;
  float widened[kBlockNumel];
  widen(words, dtype, widened, n);
  for (int64_t i = 0; i < n; ++i) {
    if (rounded[i] != words[i]) values[i] = widened[i];
  }
}

bool are_comparable(const at::Tensor& value, const at::Tensor& param) {
  const auto dtype = param.scalar_type();
  return value.device().is_cpu() && param.device().is_cpu() && value.scalar_type() == at::kFloat &&
         (dtype == at::kHalf || dtype == at::kBFloat16) && value.sizes() == param.sizes() &&
         value.strides() == param.strides() && value.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
}

}  // namespace

std::vector<int64_t> take_written_cpu(const Borrowed& values, const Borrowed& params) {
  TORCH_CHECK_VALUE(values.size() == params.size(), "take_written_cpu: expected one value for each of ", params.size(),
                    " parameters, got ", values.size());
  constexpr int64_t kGrain = 64;  // blocks
  std::vector<int64_t> others;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor &value = *values[i], &param = *params[i];
    if (!are_comparable(value, param)) {
      others.push_back(static_cast<int64_t>(i));
      continue;
    }
    auto* const of_value = static_cast<float*>(value.mutable_data_ptr());
    const auto* const of_param = static_cast<const uint16_t*>(param.const_data_ptr());
    const int64_t numel = param.numel();
    parallel_for(0, (numel + kBlockNumel - 1) / kBlockNumel, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kBlockNumel;
        take_block(of_value + first, of_param + first, param.scalar_type(), std::min(kBlockNumel, numel - first));
      }
    });
  }
  return others;
}

}  // namespace apex_npu
