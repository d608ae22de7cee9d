// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/kernels_cpu.h"

#include <cmath>
#include <vector>

#include "fused_optim/dot.h"
#include "fused_optim/encoded_block.h"
#include "fused_optim/operands.h"
#include "fused_optim/pieces.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

template <typename T>
struct Direction {
  T inverse_correction1, root_factor, eps, decay;
  bool has_decay;

  APEX_NPU_INLINE T operator()(T m, T v, T p) const {
    const T adam = m * inverse_correction1 / (std::sqrt(v) * root_factor + eps);
    return has_decay ? adam + decay * p : adam;
  }
};

template <typename T>
struct Moments {
  T *exp_avg, *exp_avg_sq;
  Gradient<T> gradient;
  Direction<T> direction;
  T beta1, beta2, beta2_rest, beta3;

  // Writes the direction to u.
  APEX_NPU_INLINE void operator()(const T* p, const T* g, T* u, int64_t begin, int64_t n) const {
    T *m = exp_avg + begin, *v = exp_avg_sq + begin;
    const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
      const T grad = gradient(g[i], p[i]);
      m[i] = beta1 * m[i] + beta3 * grad;
      v[i] = beta2 * v[i] + beta2_rest * grad * grad;
      u[i] = direction(m[i], v[i], p[i]);
    };
    for_each<T>(n, body, p, g, m, v);
  }
};

template <typename T>
struct Move {
  const T *exp_avg, *exp_avg_sq;
  Direction<T> direction;

  APEX_NPU_INLINE void operator()(T* p, T step_size, int64_t begin, int64_t n) const {
    const T *m = exp_avg + begin, *v = exp_avg_sq + begin;
    const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA { p[i] -= step_size * direction(m[i], v[i], p[i]); };
    for_each<T>(n, body, p, m, v);
  }
};

struct SquaredNorms {
  double param = 0, direction = 0;

  void operator+=(const SquaredNorms& other) {
    param += other.param;
    direction += other.direction;
  }

  double trust_ratio(double max_weight_norm) const {
    const double weight_norm = std::sqrt(param), direction_norm = std::sqrt(direction);
    if (weight_norm == 0 || direction_norm == 0) return 1;
    return (weight_norm > max_weight_norm ? max_weight_norm : weight_norm) / direction_norm;  // nan stays
  }
};

template <typename T>
struct MoveAlong {
  APEX_NPU_INLINE void operator()(T* p, const T* direction, T step_size, int64_t n) const {
    const auto body = [=](int64_t i) APEX_NPU_INLINE_LAMBDA { p[i] -= step_size * direction[i]; };
    for_each<T>(n, body, p);
  }
};

// The step size of a parameter depends on all of its moments. A parameter of one piece is still in the cache when they
// are known, including the direction. For others the direction is computed a second time, which is cheaper than writing
// it to memory. Encoded moments are computed twice and encoded the second time, because rounded moments would give
// another direction.
template <typename T>
class Lamb {
 public:
  Lamb(const Operands& operands, const Pieces& pieces, const Moments<T>& moments)
      : operands_(operands),
        pieces_(pieces),
        moments_(moments),
        move_{moments.exp_avg, moments.exp_avg_sq, moments.direction} {}

  void step(double lr) const {
    pieces_.parallel_for_each([&](size_t i) {
      if (is_encoded()) return step_encoded(pieces_[i], lr);
      alignas(64) T direction[kPieceNumel];
      update_moments(pieces_[i], direction);
      move_along(direction, pieces_[i], lr);
    });
  }

  void step_by_trust_ratio(int64_t segment_count, double lr, double max_weight_norm) const {
    // All memory is allocated before anything is written.
    const Pieces cut = pieces_.of_cut_segments();
    std::vector<SquaredNorms> of_pieces(pieces_.size()), of_segments(segment_count);
    const auto read = [&](size_t i) {
      if (is_encoded()) {
        of_pieces[i] = norms_of_encoded(pieces_[i]);
        if (pieces_[i].whole) step_encoded(pieces_[i], lr * of_pieces[i].trust_ratio(max_weight_norm));
        return;
      }
      alignas(64) T direction[kPieceNumel];
      of_pieces[i] = update_moments(pieces_[i], direction);
      if (pieces_[i].whole) move_along(direction, pieces_[i], lr * of_pieces[i].trust_ratio(max_weight_norm));
    };
    const auto add = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) of_segments[pieces_[i].segment] += of_pieces[i];
      return !pieces_[begin].whole;
    };
    pieces_.parallel_twice(cut, read, add, [&](const Piece& piece) {
      const double step_size = lr * of_segments[piece.segment].trust_ratio(max_weight_norm);
      if (is_encoded()) {
        step_encoded(piece, step_size);
      } else {
        move(piece, step_size);
      }
    });
  }

 private:
  SquaredNorms update_moments(const Piece& piece, T* directions) const {
    SquaredNorms norms;
    for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
      const int64_t begin = piece.begin + done, n = std::min(kBlockNumel, piece.numel - done);
      alignas(64) T param_copy[kBlockNumel], grad_copy[kBlockNumel];
      const T* param = operands_.param(begin, n, param_copy);
      T* direction = directions + done;
      vectorized(moments_, param, operands_.grad(begin, n, grad_copy), direction, begin, n);
      norms += {dot(param, param, n), dot(direction, direction, n)};
    }
    return norms;
  }

  void move_along(const T* directions, const Piece& piece, double step_size) const {
    for_params(piece, [&](T* param, int64_t begin, int64_t n) {
      vectorized(MoveAlong<T>(), param, directions + (begin - piece.begin), static_cast<T>(step_size), n);
    });
  }

  void move(const Piece& piece, double step_size) const {
    for_params(piece, [&](T* param, int64_t begin, int64_t n) {
      vectorized(move_, param, static_cast<T>(step_size), begin, n);
    });
  }

  // Calls change(param, begin, n) for the parameters of the blocks of a piece.
  template <typename Change>
  void for_params(const Piece& piece, const Change& change) const {
    for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
      const int64_t begin = piece.begin + done, n = std::min(kBlockNumel, piece.numel - done);
      alignas(64) T copy[kBlockNumel];
      T* const param = operands_.param(begin, n, copy);
      change(param, begin, n);
      operands_.write_back<T>(begin, n, param);
    }
  }

  bool is_encoded() const { return operands_.encoding().given(); }

  // Updates the moments of a piece, and calls visit(block, param, direction, n) for its blocks.
  template <typename Visit>
  void for_each_encoded(const Piece& piece, const Visit& visit) const {
    if constexpr (std::is_same_v<T, float>) {
      const EncodedSegment& segment = operands_.encoding().segment(piece.segment);
      alignas(64) float direction[kBlockNumel];
      for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
        const int64_t n = std::min(kBlockNumel, piece.numel - done);
        EncodedBlock block(operands_, segment, piece.begin - segment.begin + done, n);
        const States<float> states = block.copies(2);
        float* param = block.param();
        Moments<float> moments = moments_;
        moments.exp_avg = states.state[0];
        moments.exp_avg_sq = states.state[1];
        vectorized(moments, static_cast<const float*>(param), block.grad(), static_cast<float*>(direction), int64_t{0},
                   n);
        visit(block, param, static_cast<const float*>(direction), n);
      }
    }
  }

  SquaredNorms norms_of_encoded(const Piece& piece) const {
    SquaredNorms norms;
    for_each_encoded(piece, [&](EncodedBlock& /*block*/, const float* param, const float* direction, int64_t n) {
      norms += {dot(param, param, n), dot(direction, direction, n)};
    });
    return norms;
  }

  void step_encoded(const Piece& piece, double step_size) const {
    for_each_encoded(piece, [&](EncodedBlock& block, float* param, const float* direction, int64_t n) {
      vectorized(MoveAlong<float>(), param, direction, static_cast<float>(step_size), n);
      block.store_param(param);
      block.store_copies(2);
    });
  }

  const Operands& operands_;
  const Pieces& pieces_;
  const Moments<T> moments_;
  const Move<T> move_;
};

}  // namespace

void lamb_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
              const at::Tensor& exp_avg_sq, const at::Tensor& direction, const at::Tensor& starts,
              const at::Tensor& lengths, const std::optional<at::Tensor>& ids, double lr, double beta1, double beta2,
              double beta3, double eps, int64_t step, bool bias_correction, double l2, double decay, bool adapt,
              double max_weight_norm, bool maximize, const std::optional<at::Tensor>& grad_scale) {
  TORCH_CHECK_VALUE(!ids.has_value(), "lamb_: ids must be None on a CPU, where kernels find segments by their ranges");
  const State m("exp_avg", exp_avg), v("exp_avg_sq", exp_avg_sq), u("direction", direction);
  const Operands operands("lamb_", param, grad, grad_scale, maximize, {m, v, u}, encoding);
  check_segments("lamb_", starts, lengths, operands.numel());
  if (encoding.given()) {
    for (int64_t i = 0; i < starts.numel(); ++i) {
      encoding.check("lamb_", i, starts.const_data_ptr<int64_t>()[i], lengths.const_data_ptr<int64_t>()[i]);
    }
  }
  const Pieces pieces(starts, lengths);
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    const double correction1 = bias_correction ? 1 - std::pow(beta1, step) : 1;
    const double correction2 = bias_correction ? 1 - std::pow(beta2, step) : 1;
    Moments<T> moments;
    moments.exp_avg = static_cast<T*>(operands.state(0).data);
    moments.exp_avg_sq = static_cast<T*>(operands.state(1).data);
    moments.gradient = operands.gradient<T>(l2);
    moments.direction.inverse_correction1 = static_cast<T>(1 / correction1);
    moments.direction.root_factor = static_cast<T>(1 / std::sqrt(correction2));
    moments.direction.eps = static_cast<T>(eps);
    moments.direction.decay = static_cast<T>(decay);
    moments.direction.has_decay = decay != 0;
    moments.beta1 = static_cast<T>(beta1);
    moments.beta2 = static_cast<T>(beta2);
    moments.beta2_rest = static_cast<T>(1 - beta2);
    moments.beta3 = static_cast<T>(beta3);
    const Lamb<T> lamb(operands, pieces, moments);
    if (adapt) {
      lamb.step_by_trust_ratio(starts.numel(), lr, max_weight_norm);
    } else {
      lamb.step(lr);
    }
  });
}

}  // namespace apex_npu
