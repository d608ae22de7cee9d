// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "debug/exponents.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "parallel.h"

namespace apex_npu {
namespace {

constexpr int64_t kColumns = 256;
// Elements that are counted at once, and stay in the cache.
constexpr int64_t kBlockNumel = 1 << 16;
// Neighbours have equal exponents, mostly: counters of their own do not wait for each other's stores.
constexpr int64_t kTables = 8;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Zeros are in column 0, subnormal numbers with the smallest normal ones in column 1. n <= kBlockNumel.
void add_counts(const float* x, int64_t n, float factor, std::array<int64_t, kColumns>& counts) {
  uint32_t tables[kTables][kColumns] = {};
  const auto exponent = [&](int64_t i) { return bits_of(x[i] * factor) >> 23 & 255; };
  int64_t done = 0;
  for (; done + kTables <= n; done += kTables) {
    uint32_t exponents[kTables];
    for (int64_t k = 0; k < kTables; ++k) exponents[k] = exponent(done + k);
    for (int64_t k = 0; k < kTables; ++k) ++tables[k][exponents[k]];
  }
  for (; done < n; ++done) ++tables[0][exponent(done)];
  for (int64_t column = 1; column < kColumns; ++column) {
    for (const auto& table : tables) counts[column] += table[column];
  }
  int64_t zeros = 0, zeros_and_subnormals = 0;
  for (const auto& table : tables) zeros_and_subnormals += table[0];
  if (zeros_and_subnormals == 0) return;
  for (int64_t i = 0; i < n; ++i) zeros += bits_of(x[i] * factor) << 1 == 0;
  counts[0] += zeros;
  counts[1] += zeros_and_subnormals - zeros;
}

}  // namespace

at::Tensor count_exponents_cpu(const at::Tensor& x, double factor) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.device().is_cpu() && x.is_contiguous(),
                    "count_exponents: x must be contiguous float32 on the cpu, got ", x.toString(), " of shape ",
                    x.sizes(), " with strides ", x.strides());
  const float* values = x.const_data_ptr<float>();
  std::array<int64_t, kColumns> total{};
  std::mutex adding;
  parallel_for(0, x.numel(), kBlockNumel, [&](int64_t begin, int64_t end) {
    std::array<int64_t, kColumns> counts{};
    for (; begin < end; begin += kBlockNumel) {
      add_counts(values + begin, std::min(kBlockNumel, end - begin), static_cast<float>(factor), counts);
    }
    const std::lock_guard<std::mutex> lock(adding);
    for (int64_t column = 0; column < kColumns; ++column) total[column] += counts[column];
  });
  at::Tensor counts = at::empty({kColumns}, at::kLong);
  std::copy(total.begin(), total.end(), counts.mutable_data_ptr<int64_t>());
  return counts;
}

}  // namespace apex_npu
