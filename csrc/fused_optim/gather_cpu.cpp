// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/gather_cpu.h"

#include <ATen/ops/copy.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "fused_optim/convert.h"
#include "fused_optim/pieces.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

// Looks at the exponent's bits, which unlike std::isfinite the compiler turns into vector instructions.
APEX_NPU_INLINE uint32_t not_finite(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7f800000u) == 0x7f800000u;
}

APEX_NPU_INLINE uint64_t not_finite(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
}

// Returns whether an element of src is inf or nan. dst may be src.
struct Unscale {
  template <typename T>
  APEX_NPU_INLINE bool operator()(T* dst, const T* src, T inv_scale, int64_t n) const {
    decltype(not_finite(T())) bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = 0; i < n; ++i) {
      bad |= not_finite(src[i]);
      dst[i] = src[i] * inv_scale;
    }
    return bad != 0;
  }
};

struct Cast {
  template <typename To, typename From>
  APEX_NPU_INLINE void operator()(To* dst, const From* src, int64_t n) const {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<To>(src[i]);
  }
};

const void* from(const at::Tensor& t, int64_t i) {
  return static_cast<const char*>(t.const_data_ptr()) + i * static_cast<int64_t>(t.element_size());
}

void* into(const at::Tensor& t, int64_t i) {
  return static_cast<char*>(t.mutable_data_ptr()) + i * static_cast<int64_t>(t.element_size());
}

// Elements [begin, begin + n) of `t` as float: where they lie, where they are float, else in `copy`.
const float* as_float(const at::Tensor& t, int64_t begin, int64_t n, float* copy) {
  if (t.scalar_type() == at::kFloat) return static_cast<const float*>(from(t, begin));
  if (t.scalar_type() == at::kDouble) {
    vectorized(Cast(), copy, static_cast<const double*>(from(t, begin)), n);
  } else {
    widen(from(t, begin), t.scalar_type(), copy, n);
  }
  return copy;
}

bool gather_block(const at::Tensor& slot, const at::Tensor& grad, int64_t begin, int64_t n, double inv_scale) {
  alignas(64) float copy[kBlockNumel];
  if (slot.scalar_type() == at::kDouble) {
    auto* dst = static_cast<double*>(into(slot, begin));
    if (grad.scalar_type() == at::kDouble) {
      return vectorized(Unscale(), dst, static_cast<const double*>(from(grad, begin)), inv_scale, n);
    }
    vectorized(Cast(), dst, as_float(grad, begin, n, copy), n);
    return vectorized(Unscale(), dst, static_cast<const double*>(dst), inv_scale, n);
  }
  const auto factor = static_cast<float>(inv_scale);
  const float* src = as_float(grad, begin, n, copy);
  if (slot.scalar_type() == at::kFloat) {
    return vectorized(Unscale(), static_cast<float*>(into(slot, begin)), src, factor, n);
  }
  const bool bad = vectorized(Unscale(), static_cast<float*>(copy), src, factor, n);
  narrow(copy, into(slot, begin), slot.scalar_type(), n);
  return bad;
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
  Pieces pieces;
  std::vector<bool> copied(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    copied[i] = slots[i].strides() != grads[i].strides();
    if (copied[i]) slots[i].copy_(grads[i]);  // in the slot's order of elements
    pieces.add_segment(static_cast<int64_t>(i), 0, slots[i].numel());
  }
  std::atomic<bool> bad{false};
  pieces.parallel_for_each([&](size_t i) {
    const Piece& piece = pieces[i];
    const at::Tensor& slot = slots[piece.segment];
    const at::Tensor& grad = copied[piece.segment] ? slot : grads[piece.segment];
    bool found = false;
    for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
      found |= gather_block(slot, grad, piece.begin + done, std::min(kBlockNumel, piece.numel - done), inv_scale);
    }
    if (found) bad.store(true, std::memory_order_relaxed);
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
