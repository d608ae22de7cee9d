// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/unscale.h"

#include <algorithm>
#include <type_traits>

#include "fused_optim/convert.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

// Checks the bits of the exponent, because the compiler does not vectorize std::isfinite.
APEX_NPU_INLINE uint32_t not_finite(float x) { return (bit_cast<uint32_t>(x) & kFloatInf) == kFloatInf; }

APEX_NPU_INLINE uint64_t not_finite(double x) {
  constexpr uint64_t kInf = 0x7ff0000000000000u;
  return (bit_cast<uint64_t>(x) & kInf) == kInf;
}

// The number of elements by which prefetching is ahead.
constexpr int64_t kAhead = 1024;

// Computes dst[i] = src[i] * inv_scale, or with kAdds dst[i] += src[i] * inv_scale. Returns whether an element of src,
// or with kAdds a sum, is inf or nan. dst may be src.
template <bool kAdds>
struct Unscale {
  template <typename Dst, typename Src>
  APEX_NPU_INLINE bool operator()(Dst* dst, const Src* src, double inv_scale, int64_t n) const {
    using Wide = std::conditional_t<std::is_same_v<Dst, double>, double, float>;
    const auto factor = static_cast<Wide>(inv_scale);
    using Flag = decltype(not_finite(Wide()));
    Flag bad = 0;
    const auto body = [=](int64_t i) APEX_NPU_INLINE_LAMBDA -> Flag {
      const auto value = static_cast<Wide>(src[i]);
      if constexpr (kAdds) {
        const auto sum = static_cast<Wide>(dst[i]) + value * factor;
        dst[i] = sum;
        return not_finite(sum);
      } else {
        dst[i] = value * factor;
        return not_finite(value);
      }
    };
    constexpr int64_t kLine = 64 / sizeof(Src);
    int64_t i = 0;
    for (; i + kLine <= n; i += kLine) {
      APEX_NPU_PREFETCH(src + i + kAhead);
      if (static_cast<const void*>(dst) != static_cast<const void*>(src)) APEX_NPU_PREFETCH(dst + i + kAhead);
#pragma omp simd reduction(| : bad)
      for (int64_t j = i; j < i + kLine; ++j) bad |= body(j);
    }
#pragma omp simd reduction(| : bad)
    for (int64_t j = i; j < n; ++j) bad |= body(j);
    return bad != 0;
  }
};

// Returns whether an element has all bits of `mask`, which are those of the exponent.
template <typename Bits>
struct HasExponent {
  APEX_NPU_INLINE bool operator()(const Bits* x, Bits mask, int64_t n) const {
    Bits found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = 0; i < n; ++i) found |= static_cast<Bits>((x[i] & mask) == mask);
    return found != 0;
  }
};

template <typename Bits>
bool has_exponent(const Place& grad, Bits mask, int64_t n) {
  return vectorized(HasExponent<Bits>(), grad.as<Bits>(), mask, n);
}

template <typename Src>
bool unscale_from(const Place& slot, const Src* src, double inv_scale, int64_t n) {
  using Copies = Unscale<false>;
  switch (slot.dtype) {
    case at::kFloat:
      return vectorized(Copies(), slot.as_written<float>(), src, inv_scale, n);
    case at::kDouble:
      return vectorized(Copies(), slot.as_written<double>(), src, inv_scale, n);
    case at::kBFloat16:
      return vectorized(Copies(), slot.as_written<BFloat16>(), src, inv_scale, n);
    default: {
      // Separate functions convert float16, block by block.
      bool bad = false;
      alignas(64) float values[kBlockNumel];
      for (int64_t done = 0; done < n; done += kBlockNumel) {
        const int64_t part = std::min(kBlockNumel, n - done);
        bad |= vectorized(Copies(), static_cast<float*>(values), src + done, inv_scale, part);
        narrow(values, slot.as_written<uint16_t>() + done, slot.dtype, part);
      }
      return bad;
    }
  }
}

// Calls to(slot, grad) for memory of float32, float64 or bfloat16. Widens float16 gradients block by block.
template <typename To>
bool from_any(const Place& slot, const Place& grad, int64_t n, const To& to) {
  switch (grad.dtype) {
    case at::kFloat:
      return to(slot, grad.as<float>(), n);
    case at::kDouble:
      return to(slot, grad.as<double>(), n);
    case at::kBFloat16:
      return to(slot, grad.as<BFloat16>(), n);
    default: {
      bool bad = false;
      alignas(64) float values[kBlockNumel];
      for (int64_t done = 0; done < n; done += kBlockNumel) {
        const int64_t part = std::min(kBlockNumel, n - done);
        widen(grad.as<uint16_t>() + done, grad.dtype, values, part);
        bad |= to(slot.from(done), static_cast<const float*>(values), part);
      }
      return bad;
    }
  }
}

}  // namespace

bool unscale(const Place& slot, const Place& grad, double inv_scale, int64_t n) {
  return from_any(slot, grad, n, [=](const Place& to, const auto* src, int64_t count) {
    return unscale_from(to, src, inv_scale, count);
  });
}

bool accumulate(const Place& slot, const Place& grad, double inv_scale, int64_t n) {
  return from_any(slot, grad, n, [=](const Place& to, const auto* src, int64_t count) {
    return vectorized(Unscale<true>(), to.as_written<float>(), src, inv_scale, count);
  });
}

bool has_nonfinite(const Place& grad, int64_t n) {
  switch (grad.dtype) {
    case at::kFloat:
      return has_exponent<uint32_t>(grad, kFloatInf, n);
    case at::kDouble:
      return has_exponent<uint64_t>(grad, 0x7ff0000000000000u, n);
    case at::kBFloat16:
      return has_exponent<uint16_t>(grad, 0x7f80u, n);
    default:
      return has_exponent<uint16_t>(grad, 0x7c00u, n);
  }
}

}  // namespace apex_npu
