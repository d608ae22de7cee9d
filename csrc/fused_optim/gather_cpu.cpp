// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/gather_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/copy.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

namespace apex_npu {
namespace {

// Elements worth a thread of their own.
constexpr int64_t kGrainNumel = 1 << 15;

// Looks at the exponent's bits, which unlike std::isfinite the compiler turns into vector instructions.
inline uint32_t not_finite(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7f800000u) == 0x7f800000u;
}

inline uint64_t not_finite(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// A second version for wider vectors, chosen when the library is loaded; the plain one runs anywhere.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define APEX_NPU_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define APEX_NPU_WIDE_VECTORS
#endif

template <typename Dst, typename Src>
APEX_NPU_WIDE_VECTORS bool gather_one(Dst* dst, const Src* src, int64_t n, double inv_scale) {
  using Wide = std::conditional_t<std::is_same_v<Dst, double>, double, float>;
  const Wide factor = static_cast<Wide>(inv_scale);
  decltype(not_finite(Wide())) bad = 0;
  for (int64_t j = 0; j < n; ++j) {
    const Wide value = static_cast<Wide>(src[j]);
    bad |= not_finite(value);
    dst[j] = static_cast<Dst>(value * factor);
  }
  return bad != 0;
}

template <typename Dst>
bool gather_into(const at::Tensor& slot, const at::Tensor& grad, double inv_scale) {
  Dst* dst = slot.mutable_data_ptr<Dst>();
  const int64_t n = slot.numel();
  switch (grad.scalar_type()) {
    case at::kFloat:
      return gather_one(dst, grad.const_data_ptr<float>(), n, inv_scale);
    case at::kDouble:
      return gather_one(dst, grad.const_data_ptr<double>(), n, inv_scale);
    case at::kHalf:
      return gather_one(dst, grad.const_data_ptr<at::Half>(), n, inv_scale);
    default:
      return gather_one(dst, grad.const_data_ptr<at::BFloat16>(), n, inv_scale);
  }
}

bool gather(const at::Tensor& slot, const at::Tensor& grad, double inv_scale) {
  if (slot.strides() != grad.strides()) {
    slot.copy_(grad);  // in the slot's order of elements
    return gather(slot, slot, inv_scale);
  }
  switch (slot.scalar_type()) {
    case at::kFloat:
      return gather_into<float>(slot, grad, inv_scale);
    case at::kDouble:
      return gather_into<double>(slot, grad, inv_scale);
    case at::kHalf:
      return gather_into<at::Half>(slot, grad, inv_scale);
    default:
      return gather_into<at::BFloat16>(slot, grad, inv_scale);
  }
}

bool supported(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  return t.layout() == c10::kStrided && t.device().is_cpu() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

void check(const std::vector<at::Tensor>& slots, const std::vector<at::Tensor>& grads) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "gather: expected one gradient per slot (", slots.size(), "), got ",
                    grads.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    TORCH_CHECK_TYPE(supported(slots[i]) && supported(grads[i]),
                     "gather: slots and gradients must be dense float16, bfloat16, float32 or float64 tensors on the "
                     "cpu, got ",
                     slots[i].toString(), " and ", grads[i].toString(), " at index ", i);
    TORCH_CHECK_VALUE(slots[i].sizes() == grads[i].sizes(), "gather: gradient ", i, " has shape ", grads[i].sizes(),
                      ", its slot ", slots[i].sizes());
    TORCH_CHECK_VALUE(slots[i].is_non_overlapping_and_dense(), "gather: slot ", i, " must fill its memory");
  }
}

}  // namespace

void gather_cpu(const std::vector<at::Tensor>& slots, const std::vector<at::Tensor>& grads, double inv_scale,
                const std::optional<at::Tensor>& found_inf) {
  check(slots, grads);
  const auto count = static_cast<int64_t>(slots.size());
  int64_t numel = 0;
  for (const at::Tensor& slot : slots) numel += slot.numel();
  std::atomic<bool> bad{false};
  const int64_t per_thread = std::max<int64_t>(1, kGrainNumel * count / std::max<int64_t>(1, numel));
  at::parallel_for(0, count, per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (gather(slots[i], grads[i], inv_scale)) bad.store(true, std::memory_order_relaxed);
    }
  });
  if (bad && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
}

int64_t take_grads_cpu(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& params,
                       const std::vector<at::Tensor>& slots, double inv_scale,
                       const std::optional<at::Tensor>& found_inf) {
  TORCH_CHECK_VALUE(sources.size() == params.size() && sources.size() == slots.size(),
                    "take_grads: sources, params and slots must have one length");
  std::vector<at::Tensor> present, grads;
  std::vector<size_t> indices;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& grad = sources[i].grad();
    if (!grad.defined()) continue;
    const bool own = sources[i].is_same(params[i]);
    if (!supported(grad) || (own && grad.scalar_type() != slots[i].scalar_type())) return static_cast<int64_t>(i);
    present.push_back(slots[i]);
    grads.push_back(grad);
    indices.push_back(i);
  }
  gather_cpu(present, grads, inv_scale, found_inf);
  for (size_t i : indices) params[i].mutable_grad() = slots[i];
  return -1;
}

}  // namespace apex_npu
