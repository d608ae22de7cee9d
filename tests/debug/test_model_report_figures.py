# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""FLOPs and bytes of ``amp.debug.report``, against unfused computations and the states of optimizers."""

import gc
import weakref

import pytest
import torch
from devices import DEVICE, VENDOR
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import amp
from apex_npu.debug.flops import flops_of


def tally_of(model, *batch, level="O0"):
    return amp.debug.report(model, *batch, levels=level).levels[level].tally


def counted(function, *args):
    """Forward and backward by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        function(*args).sum().backward()
    return counter.get_total_flops()


class Call(nn.Module):
    """A function as a module; its parameter is the function's first argument."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape, device=DEVICE))

    def forward(self, *args):
        return self.function(self.weight, *args)


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "unfused"),
    [
        (torch.mv, lambda w, v: w @ v[:, None]),
        (lambda w, v: torch.addmv(v.detach(), w, v), lambda w, v: w @ v[:, None]),
        (lambda w, v: v.detach().clone().addmv_(w, v), lambda w, v: w @ v[:, None]),
        (lambda w, v: torch.addmm(v, w, w), lambda w, v: w @ w),
        (lambda w, v: v.repeat(6, 1).addmm_(w, w), lambda w, v: w @ w),
    ],
)
def test_products_with_vectors_and_in_place(function, unfused):
    v = torch.randn(6, device=DEVICE)
    model = Call(function, 6, 6)
    forward = sum(n for f, n in tally_of(model, v).flops.items() if f.phase == "forward")
    with FlopCounterMode(display=False) as counter:
        unfused(model.weight, v)
    assert forward == counter.get_total_flops() > 0


@pytest.mark.parametrize("dot", [torch.dot, torch.vdot])
def test_dot_products(dot):
    v = torch.randn(7, device=DEVICE)
    assert sum(tally_of(Call(dot, 7), v).flops.values()) == 2 * 7


def test_a_bilinear_layer():
    b, i, j, o = 3, 5, 7, 4
    x, y = (torch.randn(b, n, device=DEVICE, requires_grad=True) for n in (i, j))
    model = nn.Bilinear(i, j, o, device=DEVICE)
    found = tally_of(model, x, y)
    forward = sum(n for f, n in found.flops.items() if f.phase == "forward")
    with FlopCounterMode(display=False) as counter:
        torch.einsum("boj,bj->bo", torch.einsum("bi,oij->boj", x, model.weight), y)
    assert forward == counter.get_total_flops()
    product = 2 * b * o * i * j
    of_x, of_y, of_weight = product + 2 * b * i * j, product + 2 * b * o * j, product + 2 * b * i * o
    assert sum(found.flops.values()) - forward == of_x + of_y + of_weight


def gates(x, h, layer, i):
    """Input and hidden products of an LSTM's layer, unfused."""
    w, u, b, c = (getattr(layer, f"{name}_l{i}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    return F.linear(x, w, b) + F.linear(h, u, c)


def unfused_lstm(layer, x, h, c):
    for i in range(layer.num_layers):
        hidden, cell, outputs = h[i], c[i], []
        for step in x:
            into, forget, new, out = gates(step, hidden, layer, i).chunk(4, -1)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
            outputs.append(hidden)
        x = torch.stack(outputs)
    return x


@pytest.mark.skipif(VENDOR, reason="the vendor's kernel has no formula")
def test_an_lstm_is_counted_as_its_products():
    layer = nn.LSTM(5, 6, 2).to(DEVICE)
    x = torch.randn(3, 2, 5, device=DEVICE, requires_grad=True)
    h, c = (torch.randn(2, 2, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    found = amp.debug.report(layer, x, (h, c), levels=("O0", "O2"))
    expected = counted(unfused_lstm, layer, x, h, c)
    assert [sum(one.tally.flops.values()) for one in found.levels.values()] == [expected, expected]
    assert "no FLOPs stay in float32 at O2" in str(found)


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
def test_recurrent_layers_of_gpus_are_counted_as_their_products(name):
    proj = 3 if name == "_cudnn_rnn" else 0
    layer = nn.LSTM(5, 6, 2, bidirectional=True, proj_size=proj)
    x = torch.randn(4, 2, 5, requires_grad=True)
    state = [torch.randn(4, 2, n, requires_grad=True) for n in (proj or 6, 6)]
    # oneDNN's fused layer does not take float64.
    with FlopCounterMode(display=False) as counter:
        y = layer.to(torch.float64)(x.double(), tuple(t.double() for t in state))[0]
    forward = counter.get_total_flops()
    with counter:
        y.sum().backward()
    whole = forward + counter.get_total_flops()
    operator = getattr(torch.ops.aten, name).default
    derivative = getattr(torch.ops.aten, f"{name}_backward").default
    args = (x, layer._flat_weights, 4)
    assert flops_of(operator, args, {}, None) == forward > 0
    assert forward + flops_of(derivative, (*args, *state, [True] * 4), {}, None) == whole
    frozen = flops_of(derivative, (*args, *state, [True, True, True, False]), {}, None)
    assert frozen == forward


def test_operators_without_a_formula_are_named():
    with torch.library._scoped_library("report_figures", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        model = Call(
            lambda w, x: torch.linalg.qr(x.float())[0] + w @ x + torch.ops.report_figures.twice(x.detach()), 4, 4
        )
        found = amp.debug.report(model, torch.randn(4, 4, device=DEVICE), levels="O3")
    (note,) = [note for note in found.notes if "not counted" in note]
    assert note == "FLOPs of linalg_qr, report_figures::twice are not counted: there is no formula for them"
    assert "no FLOPs stay in float32" not in str(found)


def test_elementwise_functions_are_not_named():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, device=DEVICE)),
        nn.Unflatten(1, (1, 2, 2)),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Flatten(),
        nn.GELU(),
    )
    found = amp.debug.report(model, torch.randn(2, 4, device=DEVICE), levels="O3")
    assert not [note for note in found.notes if "not counted" in note]
    assert "no FLOPs stay in float32 at O3" in str(found)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_results_of_a_model_that_runs_for_real_are_freed():
    kept = []

    class Two(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.sum().item()
            e = y.exp()  # its node saves its own output
            kept.append(weakref.ref(e))
            return y, e

    found = amp.debug.report(
        Two(4, 4, device=DEVICE), torch.randn(2, 4, device=DEVICE), loss=lambda both: both[0].sum(), levels="O0"
    )
    assert found.ran
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    saved = found.levels["O0"].tally.saved
    assert saved[torch.float32] == 4 * 2 * 4  # of exp alone
