// Copyright (c) 2026, the apex_npu authors.
// SPDX-License-Identifier: BSD-3-Clause
// One direction of one layer of an LSTM or a GRU, forward and backward, in float32: what CANN's older and newer
// operators share. Sequences are [time, batch, features], states [batch, hidden]. torch's order of gates: i f j o (j is
// the cell's candidate), and r z n.
#pragma once

#include <ATen/ATen.h>

namespace host_cann {

struct RecurrentWeights {
  at::Tensor input, hidden;            // [gates * hidden, features], [gates * hidden, hidden]
  at::Tensor input_bias, hidden_bias;  // undefined: none
};

struct RecurrentGrads {
  at::Tensor input, weight_input, weight_hidden, bias_input, bias_hidden, h, c;
};

// The order in which a sequence is read, and the rows that are over before it is.
struct Sequence {
  at::Tensor x;
  bool is_reversed = false;
  at::Tensor mask;  // [time, batch, 1], 1 where there is an element; undefined: everywhere
  // Of a packed sequence that is padded to [time * batch, features]; `sizes` has the rows of each step.
  static Sequence padded(const at::Tensor& rows, const at::Tensor& sizes);
  int64_t step(int64_t i) const { return is_reversed ? x.size(0) - 1 - i : i; }
  // `states`, with zeros where the sequences are over.
  at::Tensor masked(const at::Tensor& states) const { return mask.defined() ? states * mask : states; }
};

// Each [time, batch, hidden]; past its end a sequence keeps its last h and c.
struct LstmStates {
  at::Tensor h, c, i, j, f, o, tanh_c;
};
struct GruStates {
  at::Tensor h, r, z, n, hidden_n;  // hidden_n: what r is multiplied with
};

LstmStates lstm_forward(const Sequence& x, const RecurrentWeights& w, const at::Tensor& h0, const at::Tensor& c0);
GruStates gru_forward(const Sequence& x, const RecurrentWeights& w, const at::Tensor& h0);
// `dy` is of the states of all steps, `dh` and `dc` of the last ones; undefined: zero.
RecurrentGrads lstm_backward(const Sequence& x, const RecurrentWeights& w, const at::Tensor& h0, const at::Tensor& c0,
                             const LstmStates& states, const at::Tensor& dy, const at::Tensor& dh,
                             const at::Tensor& dc);
RecurrentGrads gru_backward(const Sequence& x, const RecurrentWeights& w, const at::Tensor& h0, const GruStates& states,
                            const at::Tensor& dy, const at::Tensor& dh);

}  // namespace host_cann
