// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// The memory accesses of an optimizer with next to no arithmetic: what no kernel of the same accesses can be faster than.
// Compiled by ceiling.py for the machine at hand; no part of the package.

extern "C" {

// A norm: one stream read.
float read_only(long n, const float* __restrict g) {
  float sums[16] = {};
  for (long i = 0; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) sums[k] += g[i + k];
  }
  float sum = 0.0f;
  for (float s : sums) sum += s;
  return sum;
}

// Unscaling, clipping: one stream read and written.
void in_place(long n, float* __restrict g) {
  for (long i = 0; i < n; ++i) {
    g[i] *= 0.999999f;
  }
}

// SGD without momentum: one stream read and written, one read.
void one_pass_1(long n, float* __restrict a, const float* __restrict g) {
  for (long i = 0; i < n; ++i) {
    a[i] -= 1e-9f * g[i];
  }
}

// SGD with momentum, RMSprop: two and one.
void one_pass_2(long n, float* __restrict a, float* __restrict b, const float* __restrict g) {
  for (long i = 0; i < n; ++i) {
    b[i] = 0.5f * (b[i] + g[i]);
    a[i] -= 1e-9f * b[i];
  }
}

// Adam, Adadelta: three and one.
void one_pass_3(long n, float* __restrict a, float* __restrict b, float* __restrict c, const float* __restrict g) {
  for (long i = 0; i < n; ++i) {
    b[i] = 0.5f * (b[i] + g[i]);
    c[i] = 0.5f * (c[i] + g[i]);
    a[i] -= 1e-9f * (b[i] + c[i]);
  }
}

// LAMB, AdamP: norms need all of the moments before the first parameter can move.
void two_passes(long n, float* __restrict a, float* __restrict b, float* __restrict c, const float* __restrict g) {
  float sums[16] = {};
  long i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; ++k) {
      b[i + k] = 0.5f * (b[i + k] + g[i + k]);
      c[i + k] = 0.5f * (c[i + k] + g[i + k]);
      sums[k] += a[i + k];
    }
  }
  float sum = 0.0f;
  for (float s : sums) {
    sum += s;
  }
  const float factor = sum > 0.0f ? 1e-9f : 2e-9f;
  for (i = 0; i < n; ++i) {
    a[i] -= factor * (b[i] + c[i]);
  }
}
}
