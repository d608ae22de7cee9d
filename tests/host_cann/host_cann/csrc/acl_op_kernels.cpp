// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// What the operators of the older interface compute.
#include <cmath>
#include <limits>

#include "acl_op.h"
#include "formats.h"
#include "masks.h"
#include "recurrent.h"

namespace host_cann {
namespace {

using Operands = OlderOperands;

std::vector<int64_t> sizes_from(const at::Tensor& numbers) {
  const at::Tensor sizes = numbers.to(at::kLong).contiguous();
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel()};
}

// ---- elementwise operators, which torch_npu takes for tensors in private formats ----

template <at::Tensor (*function)(const at::Tensor&)>
void unary(const Operands& o) {
  o.write(0, function(o.read(0)));
}
template <at::Tensor (*function)(const at::Tensor&, const at::Tensor&)>
void binary(const Operands& o) {
  o.write(0, function(o.read(0), o.read(1)));
}
void copy(const Operands& o) { o.write(0, o.read(0)); }
void add(const Operands& o) { o.write(0, o.read(0) + o.read(1)); }
void sub(const Operands& o) { o.write(0, o.read(0) - o.read(1)); }
// x1 + alpha * x2, alpha a tensor of one element.
void axpy(const Operands& o) {
  const at::Tensor alpha = o.has(2) ? o.read(2).reshape({}) : at::scalar_tensor(o.attribute("alpha", 1.0f));
  o.write(0, o.read(0) + o.read(1) * alpha.to(o.read(1).scalar_type()));
}
void zeros_like(const Operands& o) { o.write(0, at::zeros_like(o.read(0))); }
void ones_like(const Operands& o) { o.write(0, at::ones_like(o.read(0))); }
void fill(const Operands& o) { o.write(0, o.read(1).reshape({}).expand(o.out.at(0).sizes)); }

// ---- optimizers ----

// var m v beta1_power beta2_power lr weight_decay beta1 beta2 epsilon grad max_grad_norm -> var m v
void apply_adam_w(const Operands& o) {
  const float beta1 = o.number(7), beta2 = o.number(8), eps = o.number(9);
  // The kernel takes the powers of the step before.
  const float power1 = o.number(3) * beta1, power2 = o.number(4) * beta2, lr = o.number(5), decay = o.number(6);
  const at::Tensor grad = o.attribute("maximize", false) ? -o.read(10) : o.read(10);
  const at::Tensor m = o.read(1) * beta1 + grad * (1 - beta1);
  const at::Tensor v = o.read(2) * beta2 + grad * grad * (1 - beta2);
  const at::Tensor denominator = (v / (1 - power2)).sqrt() + eps;
  o.write(0, o.read(0) * (1 - lr * decay) - (lr / (1 - power1)) * m / denominator);
  o.write(1, m);
  o.write(2, v);
}

// var m v lr beta1 beta2 epsilon grad max_grad_norm global_grad_norm weight_decay[, step_size] -> var m v
// BERT's Adam, without bias correction: as CANN 9 documents it, in float32. Kernels of CANN before divided the gradient
// by global_grad_norm, without multiplying it by max_grad_norm.
void apply_adam_v2(const Operands& o) {
  const float lr = o.number(3), beta1 = o.number(4), beta2 = o.number(5), eps = o.number(6);
  const float max_norm = o.number(8), norm = o.number(9), decay = o.number(10);
  const bool mbart = o.attribute("adam_mode", std::string("adam")) == "mbart_adam";
  at::Tensor grad = o.read(7).to(at::kFloat);
  if (!mbart && max_norm > 0 && norm > max_norm) grad = grad * (max_norm / norm);
  const at::Tensor p = o.read(0).to(at::kFloat);
  const at::Tensor m = o.read(1).to(at::kFloat) * beta1 + grad * (1 - beta1);
  const at::Tensor v = o.read(2).to(at::kFloat) * beta2 + grad * grad * (1 - beta2);
  const float step = mbart && o.has(11) ? o.number(11) : lr;
  o.write(0, p - step * (m / (v.sqrt() + eps)) - lr * decay * p);
  o.write(1, m);
  o.write(2, v);
}

// ---- matrices and convolutions, in private formats and on older chips ----

void mat_mul(const Operands& o) {
  const auto flag = [&](const char* name, const char* batched) {
    return o.attribute(name, false) || o.attribute(batched, false);
  };
  at::Tensor a = o.read(0), b = o.read(1);
  if (flag("transpose_x1", "adj_x1")) a = a.mT();
  if (flag("transpose_x2", "adj_x2")) b = b.mT();
  at::Tensor product = at::matmul(a.to(at::kFloat), b.to(at::kFloat));
  if (o.has(2)) product = product + o.read(2).to(at::kFloat);
  o.write(0, product);
}

struct ConvolutionAttributes {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};
// Of [batch, channels, height, width]; paddings are those of all four sides.
ConvolutionAttributes convolution_attributes(const Operands& o) {
  using List = std::vector<int64_t>;
  const List strides = o.attribute("strides", List{1, 1, 1, 1}), pads = o.attribute("pads", List{0, 0, 0, 0});
  const List dilations = o.attribute("dilations", List{1, 1, 1, 1});
  TORCH_CHECK(pads.at(0) == pads.at(1) && pads.at(2) == pads.at(3), "a convolution padded on one side more");
  return {{strides.at(2), strides.at(3)},
          {pads.at(0), pads.at(2)},
          {dilations.at(2), dilations.at(3)},
          o.attribute("groups", int64_t(1))};
}
void conv2d(const Operands& o) {
  const auto a = convolution_attributes(o);
  const auto bias = o.has(2) ? std::optional<at::Tensor>(o.read(2).to(at::kFloat)) : std::nullopt;
  o.write(0, at::conv2d(o.read(0).to(at::kFloat), o.read(1).to(at::kFloat), bias, a.stride, a.padding, a.dilation,
                        a.groups));
}
void conv2d_grad(const Operands& o, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& grad,
                 bool of_input) {
  const auto a = convolution_attributes(o);
  const auto [dx, dw, db] =
      at::convolution_backward(grad.to(at::kFloat), x.to(at::kFloat), weight.to(at::kFloat), {}, a.stride, a.padding,
                               a.dilation, false, {0, 0}, a.groups, {of_input, !of_input, false});
  o.write(0, of_input ? dx : dw);
}
// sizes of x, filter, dy -> dx. Only the sizes of x are needed, which the output has.
void conv2d_grad_input(const Operands& o) { conv2d_grad(o, at::empty(o.out.at(0).sizes), o.read(1), o.read(2), true); }
// x, sizes of the filter, dy -> d filter
void conv2d_grad_filter(const Operands& o) {
  conv2d_grad(o, o.read(0), at::empty(o.out.at(0).sizes), o.read(2), false);
}

// sizes of y, x, filter[, bias] -> y; the output is padded by the last two of four numbers
void conv2d_transpose(const Operands& o) {
  using List = std::vector<int64_t>;
  const auto a = convolution_attributes(o);
  const List extra = o.attribute("output_padding", List{0, 0, 0, 0});
  const auto bias = o.has(3) ? std::optional<at::Tensor>(o.read(3).to(at::kFloat)) : std::nullopt;
  o.write(0, at::conv_transpose2d(o.read(1).to(at::kFloat), o.read(2).to(at::kFloat), bias, a.stride, a.padding,
                                  {extra.at(2), extra.at(3)}, a.groups, a.dilation));
}

// ---- reductions, comparisons, activations and pooling, on older chips ----

at::Tensor wide(const at::Tensor& x) { return x.is_floating_point() ? x.to(at::kFloat) : x; }

// x, dimensions; integers are summed as such
void reduce_sum(const Operands& o) {
  o.write(0, at::sum(wide(o.read(0)), sizes_from(o.read(1)), o.attribute("keep_dims", false)));
}
// x, dimensions
template <at::Tensor (*function)(const at::Tensor&, at::IntArrayRef, bool)>
void reduce_to_one_of_them(const Operands& o) {
  o.write(0, function(o.read(0), sizes_from(o.read(1)), o.attribute("keep_dims", false)));
}
void is_close(const Operands& o) {
  o.write(0, at::isclose(o.read(0), o.read(1), o.attribute("rtol", 1e-5f), o.attribute("atol", 1e-8f),
                         o.attribute("equal_nan", false)));
}

// dy, x or y -> dx
void relu_grad(const Operands& o) { o.write(0, o.read(0) * (o.read(1) > 0)); }

struct PoolAttributes {
  std::vector<int64_t> size, stride, padding;
  bool ceil_mode, counts_padding;
  std::optional<int64_t> divisor;
};
// Of [batch, channels, depth, height, width], which sizes and strides may have all of; paddings are those of six sides.
PoolAttributes pool_attributes(const Operands& o) {
  using List = std::vector<int64_t>;
  const auto last_three = [&](const char* name) {
    const List all = o.attribute(name, List{1, 1, 1});
    return List(all.end() - std::min<int64_t>(3, all.size()), all.end());
  };
  const List pads = o.attribute("pads", List{0, 0, 0, 0, 0, 0});
  TORCH_CHECK(pads.at(0) == pads.at(1) && pads.at(2) == pads.at(3) && pads.at(4) == pads.at(5),
              "a pool padded on one side more");
  const auto divisor = o.attribute("divisor_override", int64_t(0));
  return {last_three("ksize"),
          last_three("strides"),
          {pads.at(0), pads.at(2), pads.at(4)},
          o.attribute("ceil_mode", false),
          o.attribute("count_include_pad", true),
          divisor ? std::optional<int64_t>(divisor) : std::nullopt};
}
void avg_pool3d(const Operands& o) {
  const auto a = pool_attributes(o);
  o.write(0, at::avg_pool3d(wide(o.read(0)), a.size, a.stride, a.padding, a.ceil_mode, a.counts_padding, a.divisor));
}
// sizes of x, dy -> dx
void avg_pool3d_grad(const Operands& o) {
  const auto a = pool_attributes(o);
  const at::Tensor x = at::empty(o.out.at(0).sizes);
  o.write(0, at::avg_pool3d_backward(wide(o.read(1)), x, a.size, a.stride, a.padding, a.ceil_mode, a.counts_padding,
                                     a.divisor));
}

// ---- batch norm, on older chips: of [batch, channels, ...], with statistics of [channels] ----

struct Channels {
  at::Tensor x;                // in float32
  std::vector<int64_t> shape;  // in which statistics meet x
  std::vector<int64_t> others;
  explicit Channels(const at::Tensor& given) : x(given.to(at::kFloat)), shape(given.dim(), 1) {
    shape.at(1) = given.size(1);
    for (int64_t d = 0; d < given.dim(); ++d) {
      if (d != 1) others.push_back(d);
    }
  }
  double count() const { return static_cast<double>(x.numel()) / static_cast<double>(x.size(1)); }
  at::Tensor spread(const at::Tensor& statistic) const { return statistic.to(at::kFloat).reshape(shape); }
  at::Tensor sum(const at::Tensor& of) const { return of.sum(others); }
};
at::Tensor inverse_root(const Operands& o, const at::Tensor& variance) {
  return (variance.to(at::kFloat) + o.attribute("epsilon", 1e-5f)).rsqrt();
}
at::Tensor normalized(const Operands& o, const Channels& c, const at::Tensor& mean, const at::Tensor& variance) {
  return (c.x - c.spread(mean)) * c.spread(inverse_root(o, variance));
}
void write_statistic(const Operands& o, size_t i, const at::Tensor& value) {
  o.write(i, value.reshape(o.out.at(i).sizes));
}

// x -> sum, sum of squares
void batch_norm_reduce(const Operands& o) {
  const Channels c(o.read(0));
  write_statistic(o, 0, c.sum(c.x));
  write_statistic(o, 1, c.sum(c.x * c.x));
}
// x sum square_sum scale offset running_mean running_var -> y running_mean running_var mean variance
void batch_norm_update(const Operands& o) {
  const Channels c(o.read(0));
  const double n = c.count(), factor = o.attribute("factor", 0.1f);
  const at::Tensor mean = o.read(1) / n, variance = (o.read(2) / n - mean * mean).clamp_min(0);
  const at::Tensor running_mean = o.read(5) * (1 - factor) + mean * factor;
  const at::Tensor running_var = o.read(6) * (1 - factor) + variance * (factor * n / std::max(n - 1, 1.0));
  o.write(0, normalized(o, c, mean, variance) * c.spread(o.read(3)) + c.spread(o.read(4)));
  write_statistic(o, 1, running_mean);
  write_statistic(o, 2, running_var);
  write_statistic(o, 3, mean);
  write_statistic(o, 4, variance);
}
// x scale offset mean variance -> y
void batch_norm_infer(const Operands& o) {
  const Channels c(o.read(0));
  o.write(0, normalized(o, c, o.read(3), o.read(4)) * c.spread(o.read(1)) + c.spread(o.read(2)));
}
// dy x mean variance -> d scale, d offset
void batch_norm_update_grad(const Operands& o) {
  const Channels dy(o.read(0)), c(o.read(1));
  write_statistic(o, 0, c.sum(dy.x * normalized(o, c, o.read(2), o.read(3))));
  write_statistic(o, 1, c.sum(dy.x));
}
// dy x d_scale d_offset scale mean variance -> dx
void batch_norm_reduce_grad(const Operands& o) {
  const Channels dy(o.read(0)), c(o.read(1));
  const at::Tensor shared = normalized(o, c, o.read(5), o.read(6)) * c.spread(o.read(2)) + c.spread(o.read(3));
  o.write(0, (dy.x - shared / c.count()) * c.spread(o.read(4).to(at::kFloat) * inverse_root(o, o.read(6))));
}
// dy scale variance -> dx
void batch_norm_infer_grad(const Operands& o) {
  const Channels dy(o.read(0));
  o.write(0, dy.x * dy.spread(o.read(1).to(at::kFloat) * inverse_root(o, o.read(2))));
}

// ---- what torch_npu has functions of its own for ----

void confusion_transpose(const Operands& o) {
  using List = std::vector<int64_t>;
  const List order = o.attribute("perm", List()), sizes = o.attribute("shape", List());
  const at::Tensor x = o.read(0);
  o.write(0, o.attribute("transpose_first", false) ? x.permute(order).reshape(sizes) : x.reshape(sizes).permute(order));
}
// logits, labels -> loss of each row, gradient of it
void softmax_cross_entropy(const Operands& o) {
  const at::Tensor logits = o.read(0).to(at::kFloat), labels = o.read(1).to(at::kFloat);
  o.write(0, -(labels * at::log_softmax(logits, 1)).sum(1));
  o.write(1, at::softmax(logits, 1) - labels);
}
void one_hot(const Operands& o, int64_t classes, const at::Tensor& on, const at::Tensor& off) {
  TORCH_CHECK(o.attribute("axis", int64_t(-1)) == -1, "one-hot along another dimension than a last one");
  const at::Tensor hot = o.read(0).to(at::kLong).unsqueeze(-1) == at::arange(classes);
  o.write(0, at::where(hot, on.reshape({}), off.reshape({})));
}
void one_hot_d(const Operands& o) { one_hot(o, o.attribute("depth", int64_t(0)), o.read(1), o.read(2)); }
void one_hot_v1(const Operands& o) { one_hot(o, o.read(1).item<int64_t>(), o.read(2), o.read(3)); }

// sizes, probability to keep -> a byte an element
void draw_bytes(const Operands& o) {
  const auto seed = o.attribute("seed", int64_t(0)), second = o.attribute("seed2", int64_t(0));
  o.write(0, drawn(sizes_from(o.read(0)), o.number(1), seed, second).reshape(o.out.at(0).sizes));
}
// sizes, probability to keep, seed, second seed, offset -> a bit an element
void draw_bits(const Operands& o) {
  const auto seed = o.read(2).item<int64_t>(), offset = o.has(4) ? o.read(4).flatten()[-1].item<int64_t>() : 0;
  o.write(0, packed(drawn(sizes_from(o.read(0)), o.number(1), seed, offset), o.out.at(0).numel()));
}
// x, mask, probability to keep
void drop_by_bytes(const Operands& o) {
  const at::Tensor x = o.read(0);
  o.write(0, dropped(x, o.read(1).flatten().narrow(0, 0, x.numel()).reshape(x.sizes()).to(at::kBool), o.number(2)));
}
void drop_by_bits(const Operands& o) {
  const at::Tensor x = o.read(0);
  o.write(0, dropped(x, unpacked(o.read(1), x.sizes()), o.number(2)));
}

// ---- norms, in two halves: what is summed or compared, and the root of that; infinity is INT_MAX there ----

constexpr float kInfinity = 2e9f;

void norm_reduce(const Operands& o) {
  const at::Tensor x = o.read(0).to(at::kFloat).abs();
  const auto axes = o.attribute("axes", std::vector<int64_t>());
  const bool keep = o.attribute("keepdim", false);
  const at::OptionalIntArrayRef dims = axes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(axes);
  const float p = o.attribute("p", 2.0f);
  if (p >= kInfinity) {
    o.write(0, axes.empty() ? x.amax() : x.amax(axes, keep));
  } else if (p <= -kInfinity) {
    o.write(0, axes.empty() ? x.amin() : x.amin(axes, keep));
  } else if (p == 0) {
    o.write(0, (x != 0).to(at::kFloat).sum(dims, keep));
  } else {
    o.write(0, x.pow(p).sum(dims, keep));
  }
}
void norm_update(const Operands& o) {
  const float p = o.attribute("p", 2.0f);
  o.write(0, p == 0 || std::abs(p) >= kInfinity ? o.read(0) : o.read(0).pow(1 / p));
}

void non_zero(const Operands& o) {
  const at::Tensor found = at::nonzero(o.read(0));
  o.write(0, o.attribute("transpose", false) ? found.t() : found);
}

// ---- the overflow flag of chips that saturate: 0 or 1 in all elements ----

void write_flag(const aclTensor& to) { write(&to, at::full_like(read(&to), overflow_flag() ? 1 : 0)); }
void get_float_status(const Operands& o) {
  write_flag(o.in.at(0));  // what torch_npu reads then
  write_flag(o.out.at(0));
}
void get_float_status_v2(const Operands& o) { write_flag(o.out.at(0)); }
void zero_output(const Operands& o) { o.write(0, at::zeros_like(read(&o.out.at(0)))); }
void clear_float_status(const Operands& o) {
  clear_overflow_flag();
  zero_output(o);
}
void clear_float_status_v2(const Operands&) { clear_overflow_flag(); }

// ---- recurrent layers: one direction of one layer; weights are [features, gates * hidden] ----

Sequence sequence_of(const Operands& o, size_t mask) {
  Sequence x;
  x.x = o.read(0);
  x.is_reversed = o.attribute("direction", std::string("UNIDIRECTIONAL")) == "REDIRECTIONAL";
  // [time, batch, hidden], the same for all of hidden; where there is none it may be one number that means nothing.
  if (o.has(mask) && o.in.at(mask).sizes.size() == 3) x.mask = o.read(mask).narrow(-1, 0, 1);
  return x;
}
at::Tensor state(const Operands& o, size_t i) {  // [batch, hidden], with or without a dimension of layers before it
  const at::Tensor given = o.read(i);
  return given.dim() == 3 ? given.squeeze(0) : given;
}
// w holds the rows for the input, and then those for the hidden state.
RecurrentWeights split_weights(const at::Tensor& w, int64_t features, const at::Tensor& bias) {
  return {w.narrow(0, 0, features).t(), w.narrow(0, features, w.size(0) - features).t(), bias, {}};
}
void write_states(const Operands& o, const Sequence& x, const LstmStates& s) {
  o.write(0, x.masked(s.h));
  o.write(1, s.h);
  o.write(2, s.c);
  o.write(3, s.i);
  o.write(4, s.j);
  o.write(5, s.f);
  o.write(6, s.o);
  o.write(7, s.tanh_c);
}
// x w b mask init_h init_c -> y h c i j f o tanh_c
void dynamic_rnn(const Operands& o) {
  const Sequence x = sequence_of(o, 3);
  write_states(o, x, lstm_forward(x, split_weights(o.read(1), x.x.size(-1), o.read(2)), state(o, 4), state(o, 5)));
}
// x w_input w_hidden b mask init_h init_c -> the same
void dynamic_rnn_v2(const Operands& o) {
  const Sequence x = sequence_of(o, 4);
  const RecurrentWeights w{o.read(1).t(), o.read(2).t(), o.has(3) ? o.read(3) : at::Tensor(), {}};
  write_states(o, x, lstm_forward(x, w, state(o, 5), state(o, 6)));
}
// x w b y init_h init_c h c dy dh dc i j f o tanh_c mask -> dw db dx d_init_h d_init_c
void dynamic_rnn_grad(const Operands& o) {
  const Sequence x = sequence_of(o, 16);
  const LstmStates states{o.read(6), o.read(7), o.read(11), o.read(12), o.read(13), o.read(14), o.read(15)};
  const RecurrentGrads grads = lstm_backward(x, split_weights(o.read(1), x.x.size(-1), {}), state(o, 4), state(o, 5),
                                             states, o.read(8), state(o, 9), state(o, 10));
  o.write(0, at::cat({grads.weight_input, grads.weight_hidden}, 1).t());
  o.write(1, grads.bias_input);
  o.write(2, grads.input);
  o.write(3, grads.h);
  o.write(4, grads.c);
}
// x w_input w_hidden y init_h init_c h c dy dh dc i j f o tanh_c -> dw_input dw_hidden db dx d_init_h d_init_c
void dynamic_rnn_v2_grad(const Operands& o) {
  const at::Tensor given = o.read(0);
  Sequence x;
  x.x = given.dim() == 2 ? given.unsqueeze(0) : given;
  const auto steps = [&](size_t i) {
    const at::Tensor t = o.read(i);
    return t.dim() == 2 ? t.unsqueeze(0) : t;
  };
  const LstmStates states{steps(6), steps(7), steps(11), steps(12), steps(13), steps(14), steps(15)};
  const RecurrentGrads grads = lstm_backward(x, {o.read(1).t(), o.read(2).t(), {}, {}}, state(o, 4), state(o, 5),
                                             states, steps(8), state(o, 9), state(o, 10));
  o.write(0, grads.weight_input.t());
  o.write(1, grads.weight_hidden.t());
  o.write(2, grads.bias_input);
  o.write(3, grads.input.reshape(o.out.at(3).sizes));
  o.write(4, grads.h.reshape(o.out.at(4).sizes));
  o.write(5, grads.c.reshape(o.out.at(5).sizes));
}
// x w_input w_hidden b_input b_hidden mask init_h -> y h z r n hidden_n
void dynamic_gru_v2(const Operands& o) {
  const Sequence x = sequence_of(o, 5);
  const GruStates s = gru_forward(x, {o.read(1).t(), o.read(2).t(), o.read(3), o.read(4)}, state(o, 6));
  o.write(0, x.masked(s.h));
  o.write(1, s.h);
  o.write(2, s.z);
  o.write(3, s.r);
  o.write(4, s.n);
  o.write(5, s.hidden_n);
}
// x w_input w_hidden y init_h h dy dh z r n hidden_n -> dw_input dw_hidden db_input db_hidden dx d_init_h
void dynamic_gru_v2_grad(const Operands& o) {
  const Sequence x = sequence_of(o, 12);
  const GruStates states{o.read(5), o.read(9), o.read(8), o.read(10), o.read(11)};
  const RecurrentGrads grads =
      gru_backward(x, {o.read(1).t(), o.read(2).t(), {}, {}}, state(o, 4), states, o.read(6), state(o, 7));
  o.write(0, grads.weight_input.t());
  o.write(1, grads.weight_hidden.t());
  o.write(2, grads.bias_input);
  o.write(3, grads.bias_hidden);
  o.write(4, grads.input);
  o.write(5, grads.h.reshape(o.out.at(5).sizes));
}

const std::map<std::string, OlderKernel>& kernels() {
  static const auto* all = new std::map<std::string, OlderKernel>{
      {"Add", add},
      {"ApplyAdamV2", apply_adam_v2},
      {"ApplyAdamW", apply_adam_w},
      {"AvgPool3D", avg_pool3d},
      {"AvgPool3DGrad", avg_pool3d_grad},
      {"AxpyV2", axpy},
      {"BN3DTrainingReduce", batch_norm_reduce},
      {"BN3DTrainingReduceGrad", batch_norm_reduce_grad},
      {"BN3DTrainingUpdate", batch_norm_update},
      {"BN3DTrainingUpdateGrad", batch_norm_update_grad},
      {"BNInfer", batch_norm_infer},
      {"BNInferGrad", batch_norm_infer_grad},
      {"BNTrainingReduce", batch_norm_reduce},
      {"BNTrainingReduceGrad", batch_norm_reduce_grad},
      {"BNTrainingUpdate", batch_norm_update},
      {"BNTrainingUpdateGrad", batch_norm_update_grad},
      {"BatchMatMul", mat_mul},
      {"BatchMatMulV2", mat_mul},
      {"Cast", copy},
      {"ConfusionTransposeD", confusion_transpose},
      {"Conv2D", conv2d},
      {"Conv2DBackpropFilter", conv2d_grad_filter},
      {"Conv2DBackpropInput", conv2d_grad_input},
      {"Conv2DTranspose", conv2d_transpose},
      {"Div", binary<at::div>},
      {"DropOutDoMask", drop_by_bits},
      {"DropOutDoMaskV3", drop_by_bytes},
      {"DropOutGenMaskV3", draw_bytes},
      {"DynamicGRUV2", dynamic_gru_v2},
      {"DynamicGRUV2Grad", dynamic_gru_v2_grad},
      {"DynamicRNN", dynamic_rnn},
      {"DynamicRNNGrad", dynamic_rnn_grad},
      {"DynamicRNNV2", dynamic_rnn_v2},
      {"DynamicRNNV2Grad", dynamic_rnn_v2_grad},
      {"Exp", unary<at::exp>},
      {"Fill", fill},
      {"Identity", copy},
      {"IsClose", is_close},
      {"LpNormReduceV2", norm_reduce},
      {"LpNormUpdateV2", norm_update},
      {"MatMul", mat_mul},
      {"MatMulV2", mat_mul},
      {"Maximum", binary<at::maximum>},
      {"Minimum", binary<at::minimum>},
      {"Mul", binary<at::mul>},
      {"NPUAllocFloatStatus", zero_output},
      {"NPUClearFloatStatus", clear_float_status},
      {"NPUClearFloatStatusV2", clear_float_status_v2},
      {"NPUGetFloatStatus", get_float_status},
      {"NPUGetFloatStatusV2", get_float_status_v2},
      {"Neg", unary<at::neg>},
      {"NonZero", non_zero},
      {"OneHot", one_hot_v1},
      {"OneHotD", one_hot_d},
      {"OnesLike", ones_like},
      {"RealDiv", binary<at::div>},
      {"ReduceMax", reduce_to_one_of_them<at::amax>},
      {"ReduceMin", reduce_to_one_of_them<at::amin>},
      {"ReduceSum", reduce_sum},
      {"Relu", unary<at::relu>},
      {"ReluGrad", relu_grad},
      {"Sigmoid", unary<at::sigmoid>},
      {"SoftmaxCrossEntropyWithLogits", softmax_cross_entropy},
      {"Sqrt", unary<at::sqrt>},
      {"Square", unary<at::square>},
      {"StatelessDropOutGenMask", draw_bits},
      {"Sub", sub},
      {"Tanh", unary<at::tanh>},
      {"TensorMove", copy},
      {"TransData", copy},
      {"ZerosLike", zeros_like},
  };
  return *all;
}

}  // namespace

OlderKernel find_older_kernel(const std::string& type) {
  const auto found = kernels().find(type);
  return found == kernels().end() ? nullptr : found->second;
}

}  // namespace host_cann
