// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Plain loops, compiled for several vector widths. The width is chosen at run time.
//
// A loop is an object whose operator() is APEX_NPU_INLINE, as are all functions that it calls. `vectorized` compiles it
// for the architecture of the build and, on x86-64, for AVX2. Inlined code is compiled for the target of the enclosing
// function; a compiler that cannot inline it reports an error. `vectorized_wide` also compiles it for AVX-512, which is
// faster for loops that convert formats. In measurements, other loops gained little if memory was the limit, and were
// slower otherwise.
//
// Wider vectors change no bit of a result: setup.py forbids contracting a * b + c (-ffp-contract=off), and sums have a
// fixed number of lanes.
#pragma once

#include <ATen/Version.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "prefetch.h"

#if defined(__GNUC__)  // clang defines it, too
#define APEX_NPU_INLINE inline __attribute__((always_inline))
#define APEX_NPU_INLINE_LAMBDA __attribute__((always_inline))
#else
#define APEX_NPU_INLINE inline
#define APEX_NPU_INLINE_LAMBDA
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define APEX_NPU_AVX2 __attribute__((target("avx2,f16c")))
#ifdef __clang__  // needs no prefer-vector-width
#define APEX_NPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#else
#define APEX_NPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")))
#endif
#endif

namespace apex_npu {

// Returns whether torch uses AVX2 on this machine, which includes float16 conversions. The environment variable
// ATEN_CPU_CAPABILITY=default disables it here as in torch.
inline bool has_avx2() {
  static const bool has = at::get_cpu_capability().rfind("AVX", 0) == 0;  // AVX2 or AVX512
  return has;
}

inline bool has_avx512() {
  static const bool has = at::get_cpu_capability() == "AVX512";
  return has;
}

namespace detail {

#ifdef APEX_NPU_AVX2
template <typename Loop, typename... Args>
APEX_NPU_AVX2 auto with_avx2(const Loop& loop, Args... args) {
  const Loop local = loop;  // without the copy, the compiler must assume that each store changes the loop's constants
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

// Calls loop(args...) in the version for this machine.
template <typename Loop, typename... Args>
auto vectorized(const Loop& loop, Args... args) {
#ifdef APEX_NPU_AVX2
  if (has_avx2()) return detail::with_avx2(loop, args...);
#endif
  return detail::with_baseline(loop, args...);
}

// Returns `operand` for loops with AVX-512. A compiler fills a vector with the narrowest numbers of a loop, so operands
// of 16 bits have lines of that length.
template <typename Operand>
APEX_NPU_INLINE Operand widened(const Operand& operand) {
  return operand;
}

// The same with a version for AVX-512, for loops that convert what they load or store.
template <typename Loop, typename... Args>
auto vectorized_wide(const Loop& loop, Args... args) {
#ifdef APEX_NPU_AVX2
  if (has_avx512()) return detail::with_avx512(loop, widened(args)...);
#endif
  return vectorized(loop, args...);
}

// The number of elements that are converted, or processed by two loops, at a time. With all operands of a rule, they
// are still in the first-level cache for the second loop.
constexpr int64_t kBlockNumel = 512;

// The least number of elements for which a thread is started.
constexpr int64_t kGrainNumel = 1 << 15;

// An element of a loop by lines: its index, and its position in the line.
struct Element {
  int64_t index;
  uint32_t lane;

  APEX_NPU_INLINE operator int64_t() const { return index; }
};

// Operands of loops are pointers, or objects that convert another format (state_codec.h). kLine is the number of
// elements that a loop processes at a time: for pointers, one cache line.
template <typename Stream>
constexpr uint32_t kLine = Stream::kLine;
template <typename T>
constexpr uint32_t kLine<T*> = 64 / sizeof(T);

// Prefetches the elements [at, at + count).
template <uint32_t count, typename T>
APEX_NPU_INLINE void prefetch(const T* stream, int64_t at) {
  for (uint32_t i = 0; i < count; i += kLine<T*>) APEX_NPU_PREFETCH(stream + at + i);
}

// Calls body(i) for each i in [0, n), line by line. A line is the longest of T's and the streams'. Prefetches `streams`
// one block ahead, so that memory is also read during a second loop. Iterations must not depend on each other.
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
