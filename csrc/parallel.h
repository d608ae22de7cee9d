// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
//
// Loops on torch's threads, with any compiler.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>

#if AT_PARALLEL_OPENMP && defined(__linux__)
#define APEX_NPU_GOMP
// The function that g++ calls for `#pragma omp parallel`. The OpenMP library of torch (libgomp or LLVM's) has it.
// clang++ would call functions that only LLVM's library has, and linking that one starts a second pool of threads.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned thread_count, unsigned flags);
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();
#endif

namespace apex_npu {

#ifdef APEX_NPU_GOMP
// A loop that a team of threads divides.
template <typename Function>
struct SharedLoop {
  int64_t begin, end, grain;
  const Function& function;

  static void run_share(void* self) noexcept {
    const auto& [begin, end, grain, function] = *static_cast<const SharedLoop*>(self);
    const int64_t shares = std::min<int64_t>(omp_get_num_threads(), at::divup(end - begin, grain));
    const int64_t length = at::divup(end - begin, shares);
    const int64_t from = begin + omp_get_thread_num() * length;
    // Runs sequentially, because this is a thread of a team.
    at::parallel_for(from, std::min(end, from + length), grain, function);
  }
};
#endif

// The same as at::parallel_for for a function that does not throw: calls function(begin, end) for ranges of at least
// `grain` that cover [begin, end). at::parallel_for itself has one thread if compiled without -fopenmp.
template <typename Function>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Function& function) {
#ifdef APEX_NPU_GOMP
  if (end - begin > grain && !at::in_parallel_region() && at::get_num_threads() > 1) {
    SharedLoop<Function> loop = {begin, end, grain, function};
    GOMP_parallel(&SharedLoop<Function>::run_share, &loop, 0, 0);
    return;
  }
#endif
  at::parallel_for(begin, end, grain, function);
}

}  // namespace apex_npu
