// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// LSTM and GRU of whole sequences and several layers, their cells, and the gradients of all.
#include "aclnn.h"
#include "recurrent.h"

using namespace host_cann;

// The sequence that enters the first layer, [time, batch, features] in all cases.
static Sequence first_input(const In& input, const In& sizes, bool batch_first) {
  if (sizes.p && sizes.get()->numel()) return Sequence::padded(input(), sizes());
  Sequence x;
  x.x = batch_first ? input().transpose(0, 1) : input();
  return x;
}

// The weights of direction number `k`: layers come one after the other, each with its forward direction first.
static RecurrentWeights weights_of(const InList& params, int64_t k, bool has_biases) {
  if (!has_biases) return {params[2 * k], params[2 * k + 1], {}, {}};
  return {params[4 * k], params[4 * k + 1], params[4 * k + 2], params[4 * k + 3]};
}

static void refuse_dropout(const char* name, int64_t layers, double dropout, bool train) {
  TORCH_CHECK(!train || dropout == 0 || layers == 1, name, " with dropout between layers is not implemented");
}

// Calls `layer(direction number, its input)`, which returns the states h, for all directions of all layers in turn.
// Returns the inputs of each layer, and last the output of the whole.
template <class Layer>
static std::vector<Sequence> through_layers(const Sequence& x, int64_t layers, bool bidirectional, Layer layer) {
  std::vector<Sequence> inputs{x};
  const int64_t directions = bidirectional ? 2 : 1;
  for (int64_t k = 0; k < layers; ++k) {
    std::vector<at::Tensor> outputs;
    for (int64_t d = 0; d < directions; ++d) {
      Sequence in = inputs.back();
      in.is_reversed = d == 1;
      outputs.push_back(in.masked(layer(k * directions + d, in)));
    }
    Sequence out = x;
    out.x = at::cat(outputs, -1);
    inputs.push_back(out);
  }
  return inputs;
}

// The state that direction `x` ends with.
static at::Tensor last(const Sequence& x, const at::Tensor& states) { return states[x.step(x.x.size(0) - 1)]; }

OP(aclnnLSTM,
   (In input, InList params, InList hx, In sizes, bool has_biases, int64_t layers, double dropout, bool train,
    bool bidirectional, bool batch_first, Out y, Out h, Out c, OutList is, OutList js, OutList fs, OutList os,
    OutList hs, OutList cs, OutList tanh_cs),
   {
     refuse_dropout("aclnnLSTM", layers, dropout, train);
     std::vector<at::Tensor> h_last, c_last;
     const auto layer = [&](int64_t k, const Sequence& x) {
       const LstmStates states = lstm_forward(x, weights_of(params, k, has_biases), hx[0][k], hx[1][k]);
       h_last.push_back(last(x, states.h));
       c_last.push_back(last(x, states.c));
       if (train) {
         is.set(k, states.i);
         js.set(k, states.j);
         fs.set(k, states.f);
         os.set(k, states.o);
         hs.set(k, states.h);
         cs.set(k, states.c);
         tanh_cs.set(k, states.tanh_c);
       }
       return states.h;
     };
     const at::Tensor out =
         through_layers(first_input(input, sizes, batch_first), layers, bidirectional, layer).back().x;
     y = batch_first ? out.transpose(0, 1) : out;
     h = at::stack(h_last);
     c = at::stack(c_last);
   });

OP(aclnnGRU,
   (In input, InList params, In hx, In sizes, bool has_biases, int64_t layers, double dropout, bool train,
    bool bidirectional, bool batch_first, Out y, Out h, OutList rs, OutList zs, OutList ns, OutList hidden_ns,
    OutList hs),
   {
     refuse_dropout("aclnnGRU", layers, dropout, train);
     std::vector<at::Tensor> h_last;
     const auto layer = [&](int64_t k, const Sequence& x) {
       const GruStates states = gru_forward(x, weights_of(params, k, has_biases), hx()[k]);
       h_last.push_back(last(x, states.h));
       if (train) {
         rs.set(k, states.r);
         zs.set(k, states.z);
         ns.set(k, states.n);
         hidden_ns.set(k, states.hidden_n);
         hs.set(k, states.h);
       }
       return states.h;
     };
     const at::Tensor out =
         through_layers(first_input(input, sizes, batch_first), layers, bidirectional, layer).back().x;
     y = (batch_first ? out.transpose(0, 1) : out).reshape(y().sizes());
     h = at::stack(h_last);
   });

// Goes through the layers last one first. `layer(direction number, its input, dy)` returns its gradients, from which
// `h_grads` and `grads` (in the order of params) are collected; returns the gradient of the first layer's input.
template <class Layer>
static at::Tensor back_through_layers(const std::vector<Sequence>& inputs, bool bidirectional, at::Tensor dy,
                                      bool has_biases, const OutList& grads, std::vector<RecurrentGrads>& all,
                                      Layer layer) {
  const int64_t directions = bidirectional ? 2 : 1, layers = static_cast<int64_t>(inputs.size()) - 1;
  all.resize(layers * directions);
  for (int64_t k = layers; k-- > 0;) {
    at::Tensor dx;
    const auto dys = dy.chunk(directions, -1);
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t number = k * directions + d, per_direction = has_biases ? 4 : 2;
      Sequence in = inputs[k];
      in.is_reversed = d == 1;
      const RecurrentGrads g = all[number] = layer(number, in, dys[d]);
      dx = dx.defined() ? dx + g.input : g.input;
      grads.set(number * per_direction, g.weight_input);
      grads.set(number * per_direction + 1, g.weight_hidden);
      if (has_biases) {
        grads.set(number * per_direction + 2, g.bias_input);
        grads.set(number * per_direction + 3, g.bias_hidden);
      }
    }
    dy = dx;
  }
  return dy;
}

static at::Tensor grad_of_output(const In& dy, const Sequence& x, int64_t width, bool batch_first) {
  const at::Tensor zeros = at::zeros({x.x.size(0), x.x.size(1), width});
  if (!dy.p) return zeros;
  return (batch_first ? dy().transpose(0, 1) : dy().reshape(zeros.sizes())).to(at::kFloat);
}

static at::Tensor part(const In& grad, int64_t k) { return grad.p ? grad()[k] : at::Tensor(); }

OP(aclnnLstmBackward,
   (In input, InList hx, InList params, In dy, In dh, In dc, InList is, InList js, InList fs, InList os, InList hs,
    InList cs, InList tanh_cs, In sizes, bool has_biases, int64_t layers, double, bool, bool bidirectional,
    bool batch_first, In, Out dx, Out dh_first, Out dc_first, OutList grads),
   {
     const Sequence x = first_input(input, sizes, batch_first);
     const auto inputs =
         through_layers(x, layers, bidirectional, [&](int64_t k, const Sequence&) { return hs[k].to(at::kFloat); });
     std::vector<RecurrentGrads> all;
     const at::Tensor out =
         back_through_layers(inputs, bidirectional, grad_of_output(dy, x, inputs.back().x.size(-1), batch_first),
                             has_biases, grads, all, [&](int64_t k, const Sequence& in, const at::Tensor& dys) {
                               const LstmStates states{hs[k], cs[k], is[k], js[k], fs[k], os[k], tanh_cs[k]};
                               return lstm_backward(in, weights_of(params, k, has_biases), hx[0][k], hx[1][k], states,
                                                    dys, part(dh, k), part(dc, k));
                             });
     std::vector<at::Tensor> h_grads, c_grads;
     for (const RecurrentGrads& g : all) {
       h_grads.push_back(g.h);
       c_grads.push_back(g.c);
     }
     dx = (batch_first ? out.transpose(0, 1) : out).reshape(dx().sizes());
     dh_first = at::stack(h_grads);
     dc_first = at::stack(c_grads);
   });

OP(aclnnGRUBackward,
   (In input, InList params, In hx, In dy, In dh, InList rs, InList zs, InList ns, InList hidden_ns, InList hs,
    In sizes, bool has_biases, int64_t layers, bool bidirectional, bool batch_first, Out dx, Out dh_first,
    OutList grads),
   {
     const Sequence x = first_input(input, sizes, batch_first);
     const auto inputs =
         through_layers(x, layers, bidirectional, [&](int64_t k, const Sequence&) { return hs[k].to(at::kFloat); });
     std::vector<RecurrentGrads> all;
     const at::Tensor out = back_through_layers(
         inputs, bidirectional, grad_of_output(dy, x, inputs.back().x.size(-1), batch_first), has_biases, grads, all,
         [&](int64_t k, const Sequence& in, const at::Tensor& dys) {
           const GruStates states{hs[k], rs[k], zs[k], ns[k], hidden_ns[k]};
           return gru_backward(in, weights_of(params, k, has_biases), hx()[k], states, dys, part(dh, k));
         });
     std::vector<at::Tensor> h_grads;
     for (const RecurrentGrads& g : all) h_grads.push_back(g.h);
     dx = (batch_first ? out.transpose(0, 1) : out).reshape(dx().sizes());
     dh_first = at::stack(h_grads);
   });

// A cell's gates after their functions are kept for the gradient, i f j o, [batch, 4 * hidden].
OP(aclnnThnnFusedLstmCell,
   (In by_input, In by_hidden, In c, In input_bias, In hidden_bias, Out h_out, Out c_out, Out kept), {
     at::Tensor sum = by_input().to(at::kFloat) + by_hidden().to(at::kFloat);
     if (input_bias.p) sum = sum + input_bias().to(at::kFloat);
     if (hidden_bias.p) sum = sum + hidden_bias().to(at::kFloat);
     const auto gates = sum.chunk(4, -1);
     const at::Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), j = gates[2].tanh(), o = gates[3].sigmoid();
     const at::Tensor fresh = f * c().to(at::kFloat) + i * j;
     c_out = fresh;
     h_out = o * fresh.tanh();
     kept = at::cat({i, f, j, o}, -1);
   });
OP(aclnnThnnFusedLstmCellBackward,
   (In dh, In dc, In c_before, In c_after, In kept, bool has_bias, Out grad_gates, Out grad_c, Out grad_bias), {
     const auto gates = kept().to(at::kFloat).chunk(4, -1);
     const at::Tensor i = gates[0], f = gates[1], j = gates[2], o = gates[3];
     const at::Tensor tanh_c = c_after().to(at::kFloat).tanh();
     const at::Tensor to_h = dh.p ? dh().to(at::kFloat) : at::zeros_like(tanh_c);
     at::Tensor to_c = to_h * o * (1 - tanh_c * tanh_c);
     if (dc.p) to_c = to_c + dc().to(at::kFloat);
     const at::Tensor all = at::cat({to_c * j * i * (1 - i), to_c * c_before().to(at::kFloat) * f * (1 - f),
                                     to_c * i * (1 - j * j), to_h * tanh_c * o * (1 - o)},
                                    -1);
     grad_gates = all;
     grad_c = to_c * f;
     if (has_bias) grad_bias = all.sum(0);
   });
