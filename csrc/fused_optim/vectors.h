// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Plain loops, compiled for the vectors of the machine that they happen to run on.
//
// A loop is an object whose operator() is APEX_NPU_INLINE, as is all that it calls. `vectorized` holds it twice: once
// for the architecture that the library is built for, which is all that other processors than x86-64 need, and once for
// AVX2. Being inlined, rather than called, is what gives the code the target of the function that holds it; a compiler
// that cannot do so says so. Loops that convert formats gain by AVX-512, for which `vectorized_wide` holds them, too;
// others were tried with it: they gain little where the memory is the limit, and lose elsewhere.
//
// Wider vectors change no bit of a result: setup.py forbids contracting a * b + c (-ffp-contract=off), and sums are
// spread over a fixed number of lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "prefetch.h"

#if defined(__GNUC__)  // clang's, too
#define APEX_NPU_INLINE inline __attribute__((always_inline))
#define APEX_NPU_INLINE_LAMBDA __attribute__((always_inline))
#else
#define APEX_NPU_INLINE inline
#define APEX_NPU_INLINE_LAMBDA
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define APEX_NPU_AVX2 __attribute__((target("avx2,f16c")))
#ifdef __clang__  // its vectors are that wide anyway
#define APEX_NPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#else
#define APEX_NPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif
#endif

namespace apex_npu {

// Whether this machine has AVX2 and float16 conversions, by the choice that torch makes for its own kernels; the
// environment variable ATEN_CPU_CAPABILITY=default, which holds torch back, holds these back, too.
bool has_avx2();
bool has_avx512();

namespace detail {

#ifdef APEX_NPU_AVX2
template <typename Loop, typename... Args>
APEX_NPU_AVX2 auto with_avx2(const Loop& loop, Args... args) {
  const Loop local = loop;  // else the compiler must assume that each store changes the loop's constants
  return local(args...);
}

template <typename Loop, typename... Args>
APEX_NPU_AVX512 auto with_avx512(const Loop& loop, Args... args) {
  const Loop local = loop;
  return local(args...);
}
#endif

template <typename Loop, typename... Args>
auto with_baseline(const Loop& loop, Args... args) {
  const Loop local = loop;
  return local(args...);
}

}  // namespace detail

// loop(args...), in the version for this machine.
template <typename Loop, typename... Args>
auto vectorized(const Loop& loop, Args... args) {
#ifdef APEX_NPU_AVX2
  if (has_avx2()) return detail::with_avx2(loop, args...);
#endif
  return detail::with_baseline(loop, args...);
}

// What stands for `operand` in loops for AVX-512. A compiler fills a vector with the narrowest numbers of a loop:
// operands of 16 bits come in lines that are as long.
template <typename Operand>
APEX_NPU_INLINE Operand widened(const Operand& operand) {
  return operand;
}

// Likewise, with a version for AVX-512, which is for loops that convert what they load or store.
template <typename Loop, typename... Args>
auto vectorized_wide(const Loop& loop, Args... args) {
#ifdef APEX_NPU_AVX2
  if (has_avx512()) return detail::with_avx512(loop, widened(args)...);
#endif
  return vectorized(loop, args...);
}

// Elements that are converted, or computed with in two loops, at a time: with all that a rule has beside them they are
// still in the first-level cache the second time.
constexpr int64_t kBlockNumel = 512;

// Elements worth a thread of their own.
constexpr int64_t kGrainNumel = 1 << 15;

// An element of a loop by lines: its index, and which of its line it is.
struct Element {
  int64_t index;
  uint32_t lane;

  APEX_NPU_INLINE operator int64_t() const { return index; }
};

// Operands of loops are pointers, or objects that stand for memory of another format (state_codec.h). kLine is how many
// elements a loop takes at a time: for pointers those of a cache line.
template <typename Stream>
constexpr uint32_t kLine = Stream::kLine;
template <typename T>
constexpr uint32_t kLine<T*> = 64 / sizeof(T);

// Elements [at, at + count).
template <uint32_t count, typename T>
APEX_NPU_INLINE void prefetch(const T* stream, int64_t at) {
  for (uint32_t i = 0; i < count; i += kLine<T*>) APEX_NPU_PREFETCH(stream + at + i);
}

// body(i) for each i in [0, n), a line (the longest of T's and the streams') after the other, fetching `streams` a
// block ahead: so the memory is at work during a second loop, too. Iterations must not depend on each other.
template <typename T, typename Body, typename... Streams>
APEX_NPU_INLINE void for_each(int64_t n, const Body& body, const Streams&... streams) {
  constexpr uint32_t kCount = std::max({kLine<T*>, kLine<Streams>...});
  int64_t i = 0;
  for (; i + kCount <= n; i += kCount) {
    (prefetch<kCount>(streams, i + kBlockNumel), ...);
#pragma omp simd
    for (uint32_t lane = 0; lane < kCount; ++lane) body(Element{i + lane, lane});
  }
  const auto rest = static_cast<uint32_t>(n - i);
#pragma omp simd
  for (uint32_t lane = 0; lane < rest; ++lane) body(Element{i + lane, lane});
}

}  // namespace apex_npu
