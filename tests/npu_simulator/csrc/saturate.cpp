// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Arithmetic without inf and NaN, as chips before the 910B have it, with a sticky flag per device.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <limits>

#include "npu.h"

// The loop that looks at every result: worth compiling well even in a build that is meant to be quick.
#if defined(__GNUC__) && !defined(__clang__)
#define NPU_SIMULATOR_HOT __attribute__((optimize("O3")))
#else
#define NPU_SIMULATOR_HOT
#endif

namespace npu_simulator {
namespace {

std::array<std::atomic<bool>, kMaxDevices> flags{};

// All exponent bits set: inf or NaN. Adding one to the exponent then carries into the sign's place.
template <typename Bits, Bits exponent, Bits unit>
NPU_SIMULATOR_HOT bool any_non_finite(const Bits* values, int64_t numel) {
  Bits found = 0;
  for (int64_t i = 0; i < numel; ++i) found |= static_cast<Bits>((values[i] & exponent) + unit);
  return (found >> (sizeof(Bits) * 8 - 1)) != 0;
}

template <typename Bits, Bits exponent, Bits unit>
void fix(Bits* values, int64_t numel) {
  constexpr Bits sign = Bits{1} << (sizeof(Bits) * 8 - 1);
  constexpr Bits mantissa = static_cast<Bits>(unit - 1);
  for (int64_t i = 0; i < numel; ++i) {
    if ((values[i] & exponent) != exponent) continue;
    const bool is_nan = (values[i] & mantissa) != 0;
    const Bits largest = static_cast<Bits>(exponent - 1);  // exponent one less than inf's, all mantissa bits
    values[i] = is_nan ? Bits{0} : static_cast<Bits>((values[i] & sign) | largest);
  }
}

template <typename Bits, Bits exponent, Bits unit>
bool saturate_values(void* data, int64_t numel) {
  auto* values = static_cast<Bits*>(data);
  if (!any_non_finite<Bits, exponent, unit>(values, numel)) return false;
  fix<Bits, exponent, unit>(values, numel);
  return true;
}

bool saturate_dense(const at::Tensor& host) {
  void* data = host.mutable_data_ptr();
  const int64_t numel = host.numel();
  switch (host.scalar_type()) {
    case at::kHalf:
      return saturate_values<uint16_t, 0x7c00, 0x0400>(data, numel);
    case at::kBFloat16:
      return saturate_values<uint16_t, 0x7f80, 0x0080>(data, numel);
    case at::kFloat:
      return saturate_values<uint32_t, 0x7f800000u, 0x00800000u>(data, numel);
    default:
      return false;
  }
}

}  // namespace

bool saturates(c10::ScalarType dtype) {
  switch (settings().saturate.load(std::memory_order_relaxed)) {
    case Saturate::kOff:
      return false;
    case Saturate::kHalf:
      return dtype == at::kHalf;
    case Saturate::kAll:
      return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
  }
  return false;
}

void saturate(const at::Tensor& host, c10::DeviceIndex index) {
  if (host.numel() == 0) return;
  bool overflowed = false;
  if (host.is_non_overlapping_and_dense()) {
    overflowed = saturate_dense(host);
  } else {
    at::Tensor copy = host.contiguous();
    overflowed = saturate_dense(copy);
    if (overflowed) host.copy_(copy);
  }
  if (overflowed) flags[index] = true;
}

bool overflow_flag(c10::DeviceIndex index) {
  check_device_index(index);
  return flags[index];
}
void clear_overflow_flag(c10::DeviceIndex index) {
  check_device_index(index);
  flags[index] = false;
}

}  // namespace npu_simulator
