// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/gather_cpu.h"

#include <ATen/ops/copy.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "combine_tensors/change_data_ptr.h"
#include "fused_optim/convert.h"
#include "fused_optim/pieces.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

// Looks at the exponent's bits, which unlike std::isfinite the compiler turns into vector instructions.
APEX_NPU_INLINE uint32_t not_finite(float x) { return (bit_cast<uint32_t>(x) & kFloatInf) == kFloatInf; }

APEX_NPU_INLINE uint64_t not_finite(double x) {
  constexpr uint64_t kInf = 0x7ff0000000000000u;
  return (bit_cast<uint64_t>(x) & kInf) == kInf;
}

APEX_NPU_INLINE double load(double x) { return x; }
APEX_NPU_INLINE float load(float x) { return x; }
APEX_NPU_INLINE float load(BFloat16 x) { return to_float(x); }

APEX_NPU_INLINE void store(double value, double& x) { x = value; }
APEX_NPU_INLINE void store(float value, float& x) { x = value; }
APEX_NPU_INLINE void store(float value, BFloat16& x) { x = to_bfloat16(value); }

// dst[i] = src[i] * inv_scale; returns whether an element of src is inf or nan. dst may be src.
struct Unscale {
  template <typename Dst, typename Src>
  APEX_NPU_INLINE bool operator()(Dst* dst, const Src* src, double inv_scale, int64_t n) const {
    using Wide = std::conditional_t<std::is_same_v<Dst, double>, double, float>;
    const auto factor = static_cast<Wide>(inv_scale);
    decltype(not_finite(Wide())) bad = 0;
#pragma omp simd reduction(| : bad)
    for (int64_t i = 0; i < n; ++i) {
      const auto value = static_cast<Wide>(load(src[i]));
      bad |= not_finite(value);
      store(value * factor, dst[i]);
    }
    return bad != 0;
  }
};

// Memory of some dtype, from an element on.
struct Place {
  Place(const at::Tensor& t, const void* data, int64_t i)
      : dtype(t.scalar_type()), data(static_cast<const char*>(data) + i * static_cast<int64_t>(t.element_size())) {}

  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
  template <typename T>
  T* as_written() const {
    return reinterpret_cast<T*>(const_cast<char*>(data));
  }

  at::ScalarType dtype;
  const char* data;
};

template <typename Src>
bool unscale_from(const Place& slot, const Src* src, double inv_scale, int64_t n) {
  switch (slot.dtype) {
    case at::kFloat:
      return vectorized(Unscale(), slot.as_written<float>(), src, inv_scale, n);
    case at::kDouble:
      return vectorized(Unscale(), slot.as_written<double>(), src, inv_scale, n);
    case at::kBFloat16:
      return vectorized(Unscale(), slot.as_written<BFloat16>(), src, inv_scale, n);
    default: {
      // float16 is converted by functions of its own, block by block.
      bool bad = false;
      alignas(64) float values[kBlockNumel];
      for (int64_t done = 0; done < n; done += kBlockNumel) {
        const int64_t part = std::min(kBlockNumel, n - done);
        bad |= vectorized(Unscale(), static_cast<float*>(values), src + done, inv_scale, part);
        narrow(values, slot.as_written<uint16_t>() + done, slot.dtype, part);
      }
      return bad;
    }
  }
}

bool unscale(const Place& slot, const Place& grad, double inv_scale, int64_t n) {
  switch (grad.dtype) {
    case at::kFloat:
      return unscale_from(slot, grad.as<float>(), inv_scale, n);
    case at::kDouble:
      return unscale_from(slot, grad.as<double>(), inv_scale, n);
    case at::kBFloat16:
      return unscale_from(slot, grad.as<BFloat16>(), inv_scale, n);
    default: {
      bool bad = false;
      alignas(64) float values[kBlockNumel];
      Place to = slot;
      const int64_t slot_size = static_cast<int64_t>(c10::elementSize(slot.dtype));
      for (int64_t done = 0; done < n; done += kBlockNumel, to.data += kBlockNumel * slot_size) {
        const int64_t part = std::min(kBlockNumel, n - done);
        widen(grad.as<uint16_t>() + done, grad.dtype, values, part);
        bad |= unscale_from(to, static_cast<const float*>(values), inv_scale, part);
      }
      return bad;
    }
  }
}

bool supported(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  // Subclasses may have no memory but that of tensors inside (DTensor).
  return t.layout() == c10::kStrided && t.device().is_cpu() && !t.unsafeGetTensorImpl()->is_python_dispatch() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

void check(const std::vector<at::Tensor>& slots, const std::vector<at::Tensor>& grads) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "gather: expected one gradient per slot (", slots.size(), "), got ",
                    grads.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    TORCH_CHECK_TYPE(supported(slots[i]) && supported(grads[i]),
                     "gather: slots and gradients must be dense float16, bfloat16, float32 or float64 tensors on the "
                     "cpu, with memory of their own, got ",
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
    const Place to(slot, slot.mutable_data_ptr(), piece.begin), from(grad, grad.const_data_ptr(), piece.begin);
    if (unscale(to, from, inv_scale, piece.numel)) bad.store(true, std::memory_order_relaxed);
  });
  if (bad && found_inf.has_value()) *found_inf->mutable_data_ptr<float>() = 1.0f;
}

int64_t take_grads_cpu(const Borrowed& sources, const Borrowed& params, const Borrowed& slots, double inv_scale,
                       const std::optional<at::Tensor>& found_inf) {
  TORCH_CHECK_VALUE(sources.size() == params.size() && sources.size() == slots.size(),
                    "take_grads: sources, params and slots must have one length");
  std::vector<at::Tensor> present, grads;
  std::vector<size_t> indices;
  int64_t unfit = -1;
  look_at_each(sources, prefetch_autograd, [&](size_t i) {
    const at::Tensor& grad = sources[i]->grad();
    if (!grad.defined() || unfit >= 0) return;
    const bool own = sources[i]->is_same(*params[i]);
    if (!supported(grad) || (own && grad.scalar_type() != slots[i]->scalar_type())) {
      unfit = static_cast<int64_t>(i);
      return;
    }
    present.push_back(*slots[i]);
    // It may lie in another's slot, which is about to be written.
    grads.push_back(own && is_slot(grad) ? grad.clone() : grad);
    indices.push_back(i);
  });
  if (unfit >= 0) return unfit;
  gather_cpu(present, grads, inv_scale, found_inf);
  for (size_t i : indices) params[i]->mutable_grad() = *slots[i];
  return -1;
}

}  // namespace apex_npu
