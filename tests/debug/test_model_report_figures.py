# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""FLOPs and bytes of ``amp.debug.report``, against unfused computations and the states of optimizers."""

import pytest
import torch
from devices import DEVICE, VENDOR
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import amp
from apex_npu.debug.model_report.flops import flops_of
from apex_npu.debug.script import FirstForward

LOW = {"O0": torch.float32, "O1": torch.float16, "O2": torch.float16}


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


@pytest.mark.parametrize("shape", [(6,), (6, 5), (2, 6, 5), (3, 1, 6, 5)])
def test_matmul(shape):
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    if len(shape) > 1:  # an outer product, the gradient of a vector's matrix, is elementwise
        assert sum(tally_of(Call(torch.matmul, 4, 6), x).flops.values()) == 3 * (2 * 4 * x.numel())
    # torch_npu's own operators.
    w, grad = torch.randn(4, 6, device="meta"), torch.randn(0, device="meta")
    args = w, torch.randn(shape, device="meta")
    assert flops_of(torch.ops.aten.matmul.default, args, {}, None) == 2 * 4 * x.numel()
    backward = torch.ops.aten.matmul_backward.default
    assert flops_of(backward, (grad, *args, [True, False]), {}, None) == 2 * 4 * x.numel()


@pytest.mark.parametrize("dot", [torch.dot, torch.vdot])
def test_dot_products(dot):
    v = torch.randn(7, device=DEVICE)
    assert sum(tally_of(Call(dot, 7), v).flops.values()) == 2 * 7


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


def test_cudnn_is_off_in_the_report_alone():
    class Noted(nn.Module):
        def forward(self, x):
            seen.append(torch.backends.cudnn.enabled)
            return x * 2

    seen, x = [], torch.randn(2, device=DEVICE, requires_grad=True)
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled):
            amp.debug.report(Noted(), x, levels="O0")
            assert torch.backends.cudnn.enabled == enabled
    assert seen == [False, False]


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


# ---- the state of optimizers -----------------------------------------------------------------------------------------


def tensors_of(state):
    """All tensors of a nested state, once each."""
    if isinstance(state, torch.Tensor):
        return {id(state): state}
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return {key: tensor for value in values for key, tensor in tensors_of(value).items()}


@pytest.mark.parametrize(
    ("make", "options"), [(torch.optim.Adafactor, {}), (torch.optim.LBFGS, {"history_size": 3, "max_iter": 2})]
)
def test_states_of_other_shapes_and_in_lists(make, options):
    model, x = nn.Linear(40, 3, device=DEVICE), torch.randn(5, 40, device=DEVICE)
    optimizer = make(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        value = model(x).square().sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(closure)
    real = sum(t.nbytes for state in optimizer.state.values() for t in tensors_of(state).values())
    found = amp.debug.report(model, x, levels="O0", optimizer=optimizer)
    assert found.levels["O0"].memory.states == {make.__name__: real}


# ---- torch.func, whose derivatives allow no hooks of saved tensors --------------------------------------------------


class Penalized(nn.Module):
    """A penalty on the gradient of the output."""

    def forward(self, x):
        return torch.func.grad(lambda x: x.square().sum())(x).sum()


def test_derivatives_of_torch_func_are_refused():
    with pytest.raises(RuntimeError, match=r"derivatives of torch\.func"):
        amp.debug.report(Penalized(), torch.randn(5, 6), loss=lambda y: y)


# ---- a script --------------------------------------------------------------------------------------------------------


@pytest.fixture
def watching():
    watching = FirstForward()
    yield watching
    watching.end()


@pytest.mark.parametrize(
    ("level", "overrides"),
    [
        ("O2", {"keep_batchnorm_fp32": False, "master_weights": False}),
        ("O2", {"cast_model_type": torch.bfloat16}),
        ("O0", {"cast_model_type": torch.bfloat16}),
    ],
)
def test_the_overrides_of_a_script_are_a_column(level, overrides, watching, capsys):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=2.0, verbosity=0, **overrides)
    model(torch.randn(8, 4, device=DEVICE))
    said = capsys.readouterr().out
    named = ", ".join(f"{name}={value}" for name, value in overrides.items())
    assert f"the script trains at {level} with {named}: {level}*\n" in said
    head, *rows = said[said.index("one iteration at each level") :].splitlines()[1:]
    own = head.split().index(f"{level}*") + 1
    cells = {row.strip().split("  ")[0]: [cell for cell in row.split("  ") if cell] for row in rows}
    tensors = [*model.parameters(), *model.buffers()]
    assert cells["parameters and buffers"][own].strip() == f"{sum(t.nbytes for t in tensors)} B"
    keeps = level == "O2" and overrides.get("master_weights", True)
    values = 4 * sum(p.numel() for p in model.parameters() if p.dtype != torch.float32) if keeps else 0
    assert cells["float32 values"][own].strip() == (f"{values} B" if values else "0")


def test_a_level_without_overrides_has_no_column_of_its_own(watching, capsys):
    model = amp.initialize(nn.Linear(4, 2, device=DEVICE), opt_level="O2", loss_scale=2.0, verbosity=0)
    model(torch.randn(8, 4, device=DEVICE))
    assert "O2*" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(VENDOR, reason="compiles without a device")
def test_a_function_compiled_around_the_model(watching, capsys):
    model = amp.initialize(nn.Linear(4, 2, device=DEVICE), opt_level="O2", verbosity=0)
    x = torch.randn(3, 4, device=DEVICE)
    torch._dynamo.reset()
    y = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)(x)
    assert capsys.readouterr().out == ""
    assert torch.equal(y, model(x).sum())
    assert "the script trains at O2" in capsys.readouterr().out
