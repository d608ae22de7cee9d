// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
#include "recurrent.h"

#include <vector>

namespace host_cann {
namespace {

at::Tensor wide(const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; }

RecurrentWeights wide(const RecurrentWeights& w) {
  return {wide(w.input), wide(w.hidden), wide(w.input_bias), wide(w.hidden_bias)};
}

at::Tensor times(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor product = at::matmul(x, weight.t());
  return bias.defined() ? product + bias : product;
}

// Collects the values of each step in the order of time.
struct Steps {
  std::vector<at::Tensor> values;
  explicit Steps(int64_t time) : values(time) {}
  void set(int64_t t, const at::Tensor& value) { values[t] = value; }
  at::Tensor all() const { return at::stack(values); }
};

// What one step leaves of a state: the new one where the sequence goes on, else the old one.
at::Tensor kept(const Sequence& x, int64_t t, const at::Tensor& fresh, const at::Tensor& old) {
  return x.mask.defined() ? at::where(x.mask[t].to(at::kBool), fresh, old) : fresh;
}

// The two parts of a gradient of a state: through the step, and past it.
struct Parts {
  at::Tensor through, past;
};
Parts parts(const Sequence& x, int64_t t, const at::Tensor& grad) {
  if (!x.mask.defined()) return {grad, at::zeros_like(grad)};
  return {grad * x.mask[t], grad * (1 - x.mask[t])};
}

at::Tensor or_zeros(const at::Tensor& grad, const at::Tensor& like) {
  return grad.defined() ? wide(grad).reshape(like.sizes()) : at::zeros_like(like);
}

at::Tensor sigmoid_grad(const at::Tensor& grad, const at::Tensor& gate) { return grad * gate * (1 - gate); }
at::Tensor tanh_grad(const at::Tensor& grad, const at::Tensor& output) { return grad * (1 - output * output); }

// The state before step `i` of those that are processed, which has index `t` in time.
at::Tensor previous(const Sequence& x, const at::Tensor& states, const at::Tensor& first, int64_t i) {
  return i == 0 ? first : states[x.step(i - 1)];
}

// Gradients of weights and inputs from those of the gates, which the input and the hidden state have each their own of.
RecurrentGrads from_gates(const Sequence& x, const RecurrentWeights& w, const at::Tensor& h_before,
                          const at::Tensor& by_input, const at::Tensor& by_hidden) {
  const at::Tensor input_rows = by_input.flatten(0, 1), hidden_rows = by_hidden.flatten(0, 1);
  RecurrentGrads grads;
  grads.input = at::matmul(by_input, w.input);
  grads.weight_input = at::mm(input_rows.t(), x.x.flatten(0, 1));
  grads.weight_hidden = at::mm(hidden_rows.t(), h_before.flatten(0, 1));
  grads.bias_input = input_rows.sum(0);
  grads.bias_hidden = hidden_rows.sum(0);
  return grads;
}

Sequence wide(Sequence x) {
  x.x = wide(x.x);
  x.mask = wide(x.mask);
  return x;
}

}  // namespace

Sequence Sequence::padded(const at::Tensor& rows, const at::Tensor& sizes) {
  const int64_t time = sizes.numel(), batch = rows.size(0) / time;
  Sequence made;
  made.x = rows.reshape({time, batch, rows.size(-1)});
  made.mask = (at::arange(batch).unsqueeze(0) < sizes.reshape({time, 1})).unsqueeze(-1).to(at::kFloat);
  return made;
}

LstmStates lstm_forward(const Sequence& sequence, const RecurrentWeights& weights, const at::Tensor& h0,
                        const at::Tensor& c0) {
  const Sequence x = wide(sequence);
  const RecurrentWeights w = wide(weights);
  const int64_t time = x.x.size(0);
  const at::Tensor by_input = times(x.x, w.input, w.input_bias);
  Steps hs(time), cs(time), is(time), js(time), fs(time), os(time), tanh_cs(time);
  at::Tensor h = wide(h0), c = wide(c0);
  for (int64_t n = 0; n < time; ++n) {
    const int64_t t = x.step(n);
    const auto gates = (by_input[t] + times(h, w.hidden, w.hidden_bias)).chunk(4, -1);
    const at::Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), j = gates[2].tanh(), o = gates[3].sigmoid();
    const at::Tensor fresh_c = f * c + i * j, tanh_c = fresh_c.tanh();
    c = kept(x, t, fresh_c, c);
    h = kept(x, t, o * tanh_c, h);
    hs.set(t, h);
    cs.set(t, c);
    is.set(t, i);
    js.set(t, j);
    fs.set(t, f);
    os.set(t, o);
    tanh_cs.set(t, tanh_c);
  }
  return {hs.all(), cs.all(), is.all(), js.all(), fs.all(), os.all(), tanh_cs.all()};
}

RecurrentGrads lstm_backward(const Sequence& sequence, const RecurrentWeights& weights, const at::Tensor& h0,
                             const at::Tensor& c0, const LstmStates& states, const at::Tensor& dy,
                             const at::Tensor& dh_last, const at::Tensor& dc_last) {
  const Sequence x = wide(sequence);
  const RecurrentWeights w = wide(weights);
  const int64_t time = x.x.size(0);
  const at::Tensor h_first = wide(h0), c_first = wide(c0), h = wide(states.h), c = wide(states.c);
  const at::Tensor i = wide(states.i), j = wide(states.j), f = wide(states.f), o = wide(states.o);
  const at::Tensor tanh_c = wide(states.tanh_c), dys = or_zeros(dy, h);
  at::Tensor dh = or_zeros(dh_last, h_first), dc = or_zeros(dc_last, c_first);
  Steps by_gates(time), h_before(time);
  for (int64_t n = time; n-- > 0;) {
    const int64_t t = x.step(n);
    const Parts to_h = parts(x, t, dh), to_c = parts(x, t, dc);
    const at::Tensor fresh_h = to_h.through + parts(x, t, dys[t]).through;
    const at::Tensor fresh_c = to_c.through + tanh_grad(fresh_h * o[t], tanh_c[t]);
    const at::Tensor di = sigmoid_grad(fresh_c * j[t], i[t]);
    const at::Tensor df = sigmoid_grad(fresh_c * previous(x, c, c_first, n), f[t]);
    const at::Tensor dj = tanh_grad(fresh_c * i[t], j[t]), d_o = sigmoid_grad(fresh_h * tanh_c[t], o[t]);
    const at::Tensor gates = at::cat({di, df, dj, d_o}, -1);
    by_gates.set(t, gates);
    h_before.set(t, previous(x, h, h_first, n));
    dh = to_h.past + at::mm(gates, w.hidden);
    dc = to_c.past + fresh_c * f[t];
  }
  RecurrentGrads grads = from_gates(x, w, h_before.all(), by_gates.all(), by_gates.all());
  grads.h = dh;
  grads.c = dc;
  return grads;
}

GruStates gru_forward(const Sequence& sequence, const RecurrentWeights& weights, const at::Tensor& h0) {
  const Sequence x = wide(sequence);
  const RecurrentWeights w = wide(weights);
  const int64_t time = x.x.size(0);
  const at::Tensor by_input = times(x.x, w.input, w.input_bias);
  Steps hs(time), rs(time), zs(time), ns(time), hidden_ns(time);
  at::Tensor h = wide(h0);
  for (int64_t i = 0; i < time; ++i) {
    const int64_t t = x.step(i);
    const auto of_x = by_input[t].chunk(3, -1), of_h = times(h, w.hidden, w.hidden_bias).chunk(3, -1);
    const at::Tensor r = (of_x[0] + of_h[0]).sigmoid(), z = (of_x[1] + of_h[1]).sigmoid();
    const at::Tensor n = (of_x[2] + r * of_h[2]).tanh();
    h = kept(x, t, (1 - z) * n + z * h, h);
    hs.set(t, h);
    rs.set(t, r);
    zs.set(t, z);
    ns.set(t, n);
    hidden_ns.set(t, of_h[2]);
  }
  return {hs.all(), rs.all(), zs.all(), ns.all(), hidden_ns.all()};
}

RecurrentGrads gru_backward(const Sequence& sequence, const RecurrentWeights& weights, const at::Tensor& h0,
                            const GruStates& states, const at::Tensor& dy, const at::Tensor& dh_last) {
  const Sequence x = wide(sequence);
  const RecurrentWeights w = wide(weights);
  const int64_t time = x.x.size(0);
  const at::Tensor h_first = wide(h0), h = wide(states.h), r = wide(states.r), z = wide(states.z);
  const at::Tensor n = wide(states.n), hidden_n = wide(states.hidden_n), dys = or_zeros(dy, h);
  at::Tensor dh = or_zeros(dh_last, h_first);
  Steps by_input(time), by_hidden(time), h_before(time);
  for (int64_t i = time; i-- > 0;) {
    const int64_t t = x.step(i);
    const Parts to_h = parts(x, t, dh);
    const at::Tensor fresh = to_h.through + parts(x, t, dys[t]).through, before = previous(x, h, h_first, i);
    const at::Tensor dn = tanh_grad(fresh * (1 - z[t]), n[t]), dz = sigmoid_grad(fresh * (before - n[t]), z[t]);
    const at::Tensor dr = sigmoid_grad(dn * hidden_n[t], r[t]);
    const at::Tensor of_h = at::cat({dr, dz, dn * r[t]}, -1);
    by_input.set(t, at::cat({dr, dz, dn}, -1));
    by_hidden.set(t, of_h);
    h_before.set(t, before);
    dh = to_h.past + fresh * z[t] + at::mm(of_h, w.hidden);
  }
  RecurrentGrads grads = from_gates(x, w, h_before.all(), by_input.all(), by_hidden.all());
  grads.h = dh;
  return grads;
}

}  // namespace host_cann
