// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "fused_optim/adamp_cpu.h"

#include <cmath>
#include <vector>

#include "fused_optim/encoded_block.h"
#include "fused_optim/lanes.h"
#include "fused_optim/operands.h"
#include "fused_optim/pieces.h"
#include "fused_optim/vectors.h"

namespace apex_npu {
namespace {

template <typename T>
struct Direction {
  T beta1, beta1_rest, root_factor, eps;
  bool nesterov;

  APEX_NPU_INLINE T operator()(T grad, T m, T v) const {
    return (nesterov ? beta1 * m + beta1_rest * grad : m) / (std::sqrt(v) * root_factor + eps);
  }
};

template <typename T>
struct Moments {
  T *exp_avg, *exp_avg_sq;
  Gradient<T> gradient;
  Direction<T> direction;
  T beta2, beta2_rest;

  // Writes the direction to u.
  APEX_NPU_INLINE void operator()(const T* p, const T* g, T* u, int64_t begin, int64_t n) const {
    T *m = exp_avg + begin, *v = exp_avg_sq + begin;
    const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
      const T grad = gradient(g[i], p[i]);
      m[i] = direction.beta1 * m[i] + direction.beta1_rest * grad;
      v[i] = beta2 * v[i] + beta2_rest * grad * grad;
      u[i] = direction(grad, m[i], v[i]);
    };
    for_each<T>(n, body, p, g, m, v);
  }
};

template <typename T>
struct Move {
  const T *exp_avg, *exp_avg_sq;
  Gradient<T> gradient;
  Direction<T> direction;
  T step_size;

  // p loses the share `decay` of itself, and goes by the direction plus `multiple` of what it was. g is read for
  // nesterov only.
  APEX_NPU_INLINE void operator()(T* p, const T* g, T decay, T multiple, int64_t begin, int64_t n) const {
    const T *m = exp_avg + begin, *v = exp_avg_sq + begin;
    const T keep = T(1) - decay;
    if (direction.nesterov) {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T u = direction(gradient(g[i], p[i]), m[i], v[i]);
        p[i] = keep * p[i] - step_size * (u + multiple * p[i]);
      };
      for_each<T>(n, body, p, g, m, v);
    } else {
      const auto body = [=, *this](int64_t i) APEX_NPU_INLINE_LAMBDA {
        const T u = direction(T(0), m[i], v[i]);
        p[i] = keep * p[i] - step_size * (u + multiple * p[i]);
      };
      for_each<T>(n, body, p, m, v);
    }
  }
};

// Sums of products over a row of a parameter, or all of it.
struct Products {
  double grad_param = 0, grad_grad = 0, param_param = 0, param_direction = 0;

  APEX_NPU_INLINE void operator+=(const Products& other) {
    grad_param += other.grad_param;
    grad_grad += other.grad_grad;
    param_param += other.param_param;
    param_direction += other.param_direction;
  }

  double cosine(double eps) const {
    return std::abs(grad_param) / ((std::sqrt(grad_grad) + eps) * (std::sqrt(param_param) + eps));
  }

  // What multiple of the parameter takes its part out of the direction.
  double multiple(double eps) const {
    const double norm = std::sqrt(param_param) + eps;
    return -param_direction / (norm * norm);
  }
};

struct Multiply {
  template <typename T>
  APEX_NPU_INLINE Products operator()(const T* p, const T* g, const T* u, double grad_factor, int64_t n) const {
    constexpr int kLanes = 8;
    Products sum;
    int64_t i = 0;
    if (n >= kLanes) {
      Lanes<kLanes> gp, gg, pp, pu;
      gp.set_products(g, p);
      gg.set_products(g, g);
      pp.set_products(p, p);
      pu.set_products(p, u);
      for (i = kLanes; i + kLanes <= n; i += kLanes) {
        gp.add_products(g + i, p + i);
        gg.add_products(g + i, g + i);
        pp.add_products(p + i, p + i);
        pu.add_products(p + i, u + i);
      }
      sum = {gp.total(), gg.total(), pp.total(), pu.total()};
    }
    for (; i < n; ++i) {
      const double grad = g[i], param = p[i], direction = u[i];
      sum += {grad * param, grad * grad, param * param, param * direction};
    }
    sum.grad_param *= grad_factor;
    sum.grad_grad *= grad_factor * grad_factor;
    return sum;
  }
};

// A parameter's rows, one after the other, and the cosines below which they, or the whole, are projected.
struct Rows {
  int64_t begin, count, length;
  double row_limit, whole_limit;

  bool may_be_projected() const { return row_limit > 0 || whole_limit > 0; }

  int64_t at(int64_t element) const { return (element - begin) / length; }

  int64_t count_in(const Piece& piece) const { return at(piece.begin + piece.numel - 1) - at(piece.begin) + 1; }

  // visit(row, begin, n) for what each row has of the elements [begin, end).
  template <typename Visit>
  void for_each_in(int64_t begin, int64_t end, const Visit& visit) const {
    for (int64_t row = at(begin); begin < end; ++row) {
      const int64_t row_end = std::min(end, this->begin + (row + 1) * length);
      visit(row, begin, row_end - begin);
      begin = row_end;
    }
  }
};

struct Options {
  double lr, eps, weight_decay, wd_ratio;
};

// What is projected, on what: each row on itself, the whole parameter, or nothing.
struct Projection {
  enum { kNothing, kRows, kWhole } view = kNothing;
  double multiple = 0;  // for kWhole
};

Projection choose_projection(const Rows& rows, const Products* of_rows, double eps) {
  Products whole;
  bool by_rows = rows.row_limit > 0;
  for (int64_t row = 0; row < rows.count; ++row) {
    whole += of_rows[row];
    by_rows = by_rows && of_rows[row].cosine(eps) < rows.row_limit;
  }
  if (by_rows) return {Projection::kRows, 0};
  if (whole.cosine(eps) < rows.whole_limit) return {Projection::kWhole, whole.multiple(eps)};
  return {Projection::kNothing, 0};
}

struct Decision {
  Projection projection;
  const Products* of_rows = nullptr;  // for kRows
};

// Whether a parameter is projected is known when all of its direction is. Where it is one piece, that is at once, with
// all of it still in the cache. The direction is computed a second time then, which is cheaper than keeping it; and so
// are encoded moments, see Lamb.
template <typename T>
class AdamP {
 public:
  AdamP(const Operands& operands, const std::vector<Rows>& params, const Moments<T>& moments, const Options& options,
        double bias_correction1)
      : operands_(operands),
        params_(params),
        options_(options),
        moments_(moments),
        move_{moments.exp_avg, moments.exp_avg_sq, moments.gradient, moments.direction,
              static_cast<T>(options.lr / bias_correction1)} {
    for (size_t i = 0; i < params.size(); ++i) {
      const int64_t numel = params[i].count * params[i].length;
      pieces_.add_segment(static_cast<int64_t>(i), params[i].begin, numel);
      if (params[i].may_be_projected() && numel > kPieceNumel) {
        cut_.add_segment(static_cast<int64_t>(i), params[i].begin, numel);
      }
    }
    int64_t products = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      first_products_.push_back(products);
      if (of(pieces_[i]).may_be_projected()) products += of(pieces_[i]).count_in(pieces_[i]);
    }
    products_.resize(products);
    of_params_.resize(params.size());
  }

  void step() {
    const auto read = [&](size_t i) {
      const Piece& piece = pieces_[i];
      Products* products = products_.data() + first_products_[i];
      update_moments(piece, products);
      if (!of(piece).may_be_projected()) {
        move(piece, Decision());
      } else if (piece.whole) {
        move(piece, {choose_projection(of(piece), products, options_.eps), products});
      }
    };
    const auto decide = [&](size_t begin, size_t end) {
      const Piece& piece = pieces_[begin];
      if (piece.whole || !of(piece).may_be_projected()) return false;
      const Products* products = join_products(begin, end);
      of_params_[piece.segment] = {choose_projection(of(piece), products, options_.eps), products};
      return true;
    };
    pieces_.parallel_twice(cut_, read, decide, [&](const Piece& piece) { move(piece, of_params_[piece.segment]); });
  }

 private:
  void update_moments(const Piece& piece, Products* products) const {
    const Rows& param = of(piece);
    const int64_t first_row = param.at(piece.begin);
    alignas(64) T direction[kBlockNumel];
    const auto multiply = [&](const T* p, const T* g, int64_t begin, int64_t n) {
      param.for_each_in(begin, begin + n, [&](int64_t row, int64_t at, int64_t count) {
        const int64_t i = at - begin;
        products[row - first_row] += vectorized(Multiply(), p + i, g + i, static_cast<const T*>(direction + i),
                                                static_cast<double>(moments_.gradient.factor), count);
      });
    };
    if (is_encoded()) {
      if (!param.may_be_projected()) return;
      for_each_encoded(piece, direction,
                       [&](EncodedBlock& /*block*/, T* p, const T* g, const States<T>& /*states*/, int64_t begin,
                           int64_t n) { multiply(p, g, begin, n); });
      return;
    }
    for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
      const int64_t begin = piece.begin + done, n = std::min(kBlockNumel, piece.numel - done);
      const ParamBlock<T> p(operands_, begin, n);
      const GradBlock<T> g(operands_, begin, n);
      vectorized(moments_, p.data(), g.data(), static_cast<T*>(direction), begin, n);
      if (param.may_be_projected()) multiply(p.data(), g.data(), begin, n);
    }
  }

  bool is_encoded() const { return operands_.encoding().given(); }

  // visit(block, p, g, states, begin, n) for the blocks of a piece, the moments updated in copies.
  template <typename Visit>
  void for_each_encoded(const Piece& piece, T* direction, const Visit& visit) const {
    if constexpr (std::is_same_v<T, float>) {
      const EncodedSegment& segment = operands_.encoding().segment(piece.segment);
      for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
        const int64_t begin = piece.begin + done, n = std::min(kBlockNumel, piece.numel - done);
        EncodedBlock block(operands_, segment, begin - segment.begin, n);
        const States<T> states = block.copies(2);
        T* p = block.param();
        const T* g = block.grad();
        Moments<T> moments = moments_;
        moments.exp_avg = states.state[0];
        moments.exp_avg_sq = states.state[1];
        vectorized(moments, static_cast<const T*>(p), g, direction, int64_t{0}, n);
        visit(block, p, g, states, begin, n);
      }
    }
  }

  // Adds up what neighbouring pieces have of the same row. What is returned has one entry per row.
  const Products* join_products(size_t first, size_t end) {
    const Rows& param = of(pieces_[first]);
    Products* joined = products_.data() + first_products_[first];
    const Products* next = joined;
    int64_t rows = 0;
    for (size_t i = first; i < end; ++i) {
      const int64_t first_row = param.at(pieces_[i].begin);
      for (int64_t row = first_row; row < first_row + param.count_in(pieces_[i]); ++row, ++next) {
        if (row < rows) {
          joined[row] += *next;
        } else {
          joined[rows++] = *next;
        }
      }
    }
    return joined;
  }

  void move(const Piece& piece, const Decision& decision) const {
    const Rows& param = of(piece);
    const Projection& projection = decision.projection;
    const bool projected = projection.view != Projection::kNothing;
    const T decay = static_cast<T>(options_.lr * options_.weight_decay * (projected ? options_.wd_ratio : 1));
    // The moments begin at element `origin` of the buffers.
    const auto move_block = [&](const Move<T>& move, T* p, const T* g, int64_t origin, int64_t begin, int64_t n) {
      if (projection.view == Projection::kRows) {
        param.for_each_in(begin, begin + n, [&](int64_t row, int64_t at, int64_t count) {
          const T multiple = static_cast<T>(decision.of_rows[row].multiple(options_.eps));
          vectorized(move, p + (at - begin), g + (at - begin), decay, multiple, at - origin, count);
        });
      } else {
        vectorized(move, p, g, decay, static_cast<T>(projection.multiple), begin - origin, n);
      }
    };
    if (is_encoded()) {
      alignas(64) T direction[kBlockNumel];
      for_each_encoded(piece, direction,
                       [&](EncodedBlock& block, T* p, const T* g, const States<T>& states, int64_t begin, int64_t n) {
                         Move<T> move = move_;
                         move.exp_avg = states.state[0];
                         move.exp_avg_sq = states.state[1];
                         move_block(move, p, g, begin, begin, n);
                         if constexpr (std::is_same_v<T, float>) block.store_param(p);
                         block.store_copies(2);
                       });
      return;
    }
    for (int64_t done = 0; done < piece.numel; done += kBlockNumel) {
      const int64_t begin = piece.begin + done, n = std::min(kBlockNumel, piece.numel - done);
      const ParamBlock<T> p(operands_, begin, n);
      const GradBlock<T> g(operands_, begin, move_.direction.nesterov ? n : 0);
      move_block(move_, p.data(), g.data(), 0, begin, n);
      p.write_back();
    }
  }

  const Rows& of(const Piece& piece) const { return params_[piece.segment]; }

  const Operands& operands_;
  const std::vector<Rows>& params_;
  const Options options_;
  const Moments<T> moments_;
  const Move<T> move_;
  // All memory is taken before anything moves.
  Pieces pieces_, cut_;                  // the latter: of what may be projected and is more than one
  std::vector<Products> products_;       // of what each piece has of each row, where that is needed
  std::vector<int64_t> first_products_;  // where each piece has its own
  std::vector<Decision> of_params_;      // where that is not one piece
};

void check_limits(const at::Tensor& limits, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(limits.scalar_type() == dtype && limits.device().is_cpu() && limits.dim() == 1, "adamp_: ", name,
                   " must be a flat ", dtype, " tensor on the cpu, got ", limits.toString());
}

std::vector<Rows> rows_of_params(const at::Tensor& starts, const at::Tensor& lengths, const at::Tensor& owner,
                                 const at::Tensor& row_limit, const at::Tensor& whole_limit, at::ScalarType dtype) {
  check_limits(row_limit, "row_limit", dtype);
  check_limits(whole_limit, "whole_limit", dtype);
  TORCH_CHECK_TYPE(owner.scalar_type() == at::kLong && owner.device().is_cpu() && owner.is_contiguous(),
                   "adamp_: owner must be a flat int64 tensor on the cpu, got ", owner.toString());
  const int64_t row_count = starts.numel(), param_count = row_limit.numel() - 1;
  TORCH_CHECK_VALUE(owner.numel() == row_count + 1, "adamp_: owner must have one entry per row (", row_count,
                    ") and one for padding, got ", owner.numel());
  TORCH_CHECK_VALUE(param_count >= 0 && whole_limit.numel() == param_count + 1,
                    "adamp_: row_limit and whole_limit must have one entry for padding and one per parameter, got ",
                    row_limit.numel(), " and ", whole_limit.numel());
  const at::Tensor row_limits = row_limit.to(at::kDouble), whole_limits = whole_limit.to(at::kDouble);
  const int64_t* start = starts.const_data_ptr<int64_t>();
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  const int64_t* of = owner.const_data_ptr<int64_t>();
  std::vector<Rows> params;
  int64_t row = 0;
  for (int64_t i = 1; i <= param_count; ++i) {
    TORCH_CHECK_VALUE(row < row_count && of[row] == i, "adamp_: owner must count the parameters up from 1, but row ",
                      row, " of ", row_count, " is not of parameter ", i);
    Rows rows = {start[row], 0, length[row], row_limits.const_data_ptr<double>()[i],
                 whole_limits.const_data_ptr<double>()[i]};
    for (; row < row_count && of[row] == i; ++row, ++rows.count) {
      TORCH_CHECK_VALUE(length[row] == rows.length && start[row] == rows.begin + rows.count * rows.length,
                        "adamp_: rows of a parameter must be of one length and lie one behind the other, but row ", row,
                        " has ", length[row], " elements from ", start[row], " on, and parameter ", i, " rows of ",
                        rows.length, " from ", rows.begin, " on");
    }
    params.push_back(rows);
  }
  TORCH_CHECK_VALUE(row == row_count, "adamp_: row ", row, " is of parameter ", of[row], ", but there are ",
                    param_count);
  return params;
}

}  // namespace

void adamp_cpu(const Encoding& encoding, const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& model_param, const at::Tensor& direction,
               const at::Tensor& starts, const at::Tensor& lengths, const std::optional<at::Tensor>& /*ids*/,
               const at::Tensor& owner, const at::Tensor& row_limit, const at::Tensor& whole_limit, double lr,
               double beta1, double beta2, double eps, double weight_decay, double wd_ratio, bool nesterov,
               bool maximize, int64_t step, const std::optional<at::Tensor>& grad_scale) {
  const State m("exp_avg", exp_avg), v("exp_avg_sq", exp_avg_sq), u("direction", direction);
  const Operands operands("adamp_", param, grad, model_param, grad_scale, maximize, {m, v, u}, encoding);
  check_segments("adamp_", starts, lengths, operands.numel());
  const std::vector<Rows> params =
      rows_of_params(starts, lengths, owner, row_limit, whole_limit, direction.scalar_type());
  for (size_t i = 0; encoding.given() && i < params.size(); ++i) {
    encoding.check("adamp_", static_cast<int64_t>(i), params[i].begin, params[i].count * params[i].length);
  }
  operands.in_its_type([&](auto zero) {
    using T = decltype(zero);
    Moments<T> moments;
    moments.exp_avg = static_cast<T*>(operands.state(0).data);
    moments.exp_avg_sq = static_cast<T*>(operands.state(1).data);
    moments.gradient = operands.gradient<T>(0);
    moments.direction.beta1 = static_cast<T>(beta1);
    moments.direction.beta1_rest = static_cast<T>(1 - beta1);
    moments.direction.root_factor = static_cast<T>(1 / std::sqrt(1 - std::pow(beta2, step)));
    moments.direction.eps = static_cast<T>(eps);
    moments.direction.nesterov = nesterov;
    moments.beta2 = static_cast<T>(beta2);
    moments.beta2_rest = static_cast<T>(1 - beta2);
    const Options options = {lr, eps, weight_decay, wd_ratio};
    AdamP<T>(operands, params, moments, options, 1 - std::pow(beta1, step)).step();
  });
}

}  // namespace apex_npu
