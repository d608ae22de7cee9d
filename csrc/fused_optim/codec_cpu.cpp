// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>

#include "fused_optim/kernels_cpu.h"
#include "fused_optim/state_codec.h"
#include "parallel.h"

namespace apex_npu {
namespace {

// One state of a run, and its values in float32.
class StoredRun {
 public:
  StoredRun(const char* op, const at::Tensor& stored, const std::optional<at::Tensor>& scales, const at::Tensor& table,
            int64_t count, const at::Tensor& values)
      : encoding_(std::nullopt, scales.has_value() ? at::TensorList(*scales) : at::TensorList(), table, count, false),
        values_(values.mutable_data_ptr<float>()),
        numel_(values.numel()) {
    const bool has_codes = stored.scalar_type() == at::kChar || stored.scalar_type() == at::kByte;
    TORCH_CHECK_TYPE(has_codes || stored.scalar_type() == at::kBFloat16, op, ": stored must be bfloat16, int8 or ",
                     "uint8, got ", stored.scalar_type());
    TORCH_CHECK_VALUE(stored.device().is_cpu() && values.device().is_cpu() && stored.is_contiguous() &&
                          values.is_contiguous() && stored.numel() == numel_ && encoding_.end() <= numel_,
                      op, ": stored and values must be contiguous, on the cpu, and of all ", encoding_.end(),
                      " elements of table, got ", stored.numel(), " and ", numel_);
    TORCH_CHECK_VALUE(!has_codes || (scales.has_value() && scales->device().is_cpu() && scales->is_contiguous() &&
                                     scales->scalar_type() == at::kFloat && scales->numel() >= encoding_.scale_count()),
                      op, ": stored is ", stored.scalar_type(), " and has no ", encoding_.scale_count(),
                      " float32 scales on the cpu");
    state_ = {stored.mutable_data_ptr(), stored.scalar_type(), has_codes ? scales->mutable_data_ptr<float>() : nullptr};
  }

  // Calls visit(segment, first, n, at, scale) for all blocks: n elements that begin at `first` in their parameter and
  // at `at` in the run, and whose first scale is `scale`.
  template <typename Visit>
  void for_each_block(const Visit& visit) const {
    parallel_for(0, encoding_.blocks(), kGrainNumel / kBlockNumel, [&](int64_t from, int64_t to) {
      encoding_.for_blocks(from, to, [&](const EncodedSegment& segment, int64_t first, int64_t n) {
        visit(segment, first, n, segment.begin + first, segment.first_scale + first / kScaleNumel);
      });
    });
  }

  void zero_padding(int64_t segment_count) const {
    int64_t end = 0;
    for (int64_t i = 0; i < segment_count; ++i) {
      const EncodedSegment& segment = encoding_.segment(i);
      std::fill(values_ + end, values_ + segment.begin, 0.0f);
      end = segment.begin + segment.numel;
    }
    std::fill(values_ + end, values_ + numel_, 0.0f);
  }

  const StateBuffer& state() const { return state_; }
  float* values() const { return values_; }
  uint32_t count() const { return encoding_.count(); }

 private:
  Encoding encoding_;
  StateBuffer state_;
  float* values_;
  int64_t numel_;
};

}  // namespace

void decode_state_cpu(const at::Tensor& stored, const std::optional<at::Tensor>& scales, const at::Tensor& table,
                      const at::Tensor& values) {
  const StoredRun run("decode_state", stored, scales, table, 0, values);
  run.zero_padding(table.size(0));
  run.for_each_block([&](const EncodedSegment& /*segment*/, int64_t /*first*/, int64_t n, int64_t at, int64_t scale) {
    decode_state(run.state(), at, scale, run.values() + at, n);
  });
}

void encode_state_cpu(const at::Tensor& values, const at::Tensor& stored, const std::optional<at::Tensor>& scales,
                      const at::Tensor& table, int64_t count, int64_t index) {
  const StoredRun run("encode_state", stored, scales, table, count, values);
  const auto pair = static_cast<uint32_t>(index / 2);
  const int half = static_cast<int>(index % 2);
  run.for_each_block([&](const EncodedSegment& segment, int64_t first, int64_t n, int64_t at, int64_t scale) {
    const RandomWords random(first, static_cast<uint32_t>(segment.position), run.count(), pair);
    encode_state(run.state(), at, scale, run.values() + at, random, half, n);
  });
}

}  // namespace apex_npu
