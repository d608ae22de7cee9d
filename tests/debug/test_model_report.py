# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``amp.debug.report`` says of a model, against runs of that model with values, and formulas."""

import collections
import copy
import dataclasses
import io
import math
import random
import threading
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from covering import by_turns
from debug import healthy
from debug.test_watching import hooks_of_torch
from devices import DEVICE, VENDOR
from small_programs import backward
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from apex_npu import amp, optimizers
from apex_npu.amp.session import current
from apex_npu.backends._torch_private import dispatch_modes
from apex_npu.debug.model_report.tally import flops_of
from apex_npu.debug.script import FirstForward

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LOW = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
# Functions whose dtypes are compared with a run: products, what stays wide at O1, and what takes its inputs' dtype.
COMPARED = {
    *("addmm", "mm", "bmm", "convolution", "convolution_backward", "gelu", "gelu_backward", "_softmax", "embedding"),
    *("_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "relu_"),
    *("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "masked_fill", "threshold_backward", "mean"),
}


class Net(nn.Module):
    """Convolution, batch norm, attention, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(healthy.Block(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x)), inplace=True).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Tokens(healthy.GPT):
    """Shared weights: the embedding is the head."""


# How many saved means and deviations of norms are float32 by torch's rules for sizes and dtypes, and are not in a run;
# below 0 the reverse. Those of the CPU are wrong for mixed batch norms; the stand-in npu computes by the CPU's kernels.
BATCH_NORM, LAYER_NORMS = 2 * 8, {Net: 2 * 2 * 2 * 16, Tokens: 2 * 2 * 2 * 6}
STATISTICS = {
    "cpu": {(Net, level): -BATCH_NORM for level in ("O1", "O2", "O4", "O5")},
    "npu": {(kind, level): n for kind, n in LAYER_NORMS.items() for level in ("O2", "O3", "O5")}
    | {(Net, "O3"): LAYER_NORMS[Net] + BATCH_NORM},
    "cuda": {},
}

# Of torch_npu: weights and biases of norms, of 8 elements each, in low precision; elements that each dropout reads.
NORMS = {(kind, level): 4 for kind in (Net, Tokens) for level in ("O2", "O3", "O5")} | {(Net, "O3"): 6}
DROPPED = {Net: 2 * 16 * 16, Tokens: 2 * 6 * 16}


def made(kind):
    torch.manual_seed(0)
    model = kind().to(DEVICE)
    batch = torch.randn(2, 3, 4, 4) if kind is Net else torch.randint(11, (2, 6))
    targets = torch.tensor([1, 2]) if kind is Net else torch.randint(11, (12,))
    targets = targets.to(DEVICE)
    return model, batch.to(DEVICE), lambda y: F.cross_entropy(y.flatten(0, -2).float(), targets)


class Seen(TorchDispatchMode):
    """What a run with values calls."""

    def __init__(self, model):
        super().__init__()
        self.calls, self.casts, self.bytes, self.weights = Counter(), Counter(), Counter(), set()
        self.names = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self.names[id(param)] = "=".join(filter(None, [self.names.get(id(param)), name]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = next(
            (t for t in (result if isinstance(result, tuple) else [result]) if isinstance(t, torch.Tensor)), None
        )
        if name in COMPARED:
            self.calls[name, first.dtype] += 1
        source = {"_to_copy": args[0], "copy_": args[-1]}.get(name) if args else None
        tensors = [] if source is None else [source, first]
        if len({t.dtype for t in tensors if t.is_floating_point()}) == 2:
            key = source.dtype, first.dtype
            self.casts[key] += 1
            self.bytes[key] += source.nbytes + first.nbytes
            self.weights |= {self.names[id(source)]} if id(source) in self.names else set()
        return result


def run(kind, level):
    """One iteration with values, and the bytes that it has saved for backward."""
    model, batch, loss = made(kind)
    optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), batch)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved.setdefault(storage._cdata, (tensor, tensor.dtype, storage.nbytes()))
        return tensor

    with Seen(model) as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        value = loss(model(batch))
        value.backward()
    totals = Counter()
    for _, dtype, n in saved.values():
        totals[dtype] += n
    return model, optimizer, seen, totals


def bits(tensor):
    return tensor.detach().cpu().clone().flatten().view(torch.uint8).numpy().tobytes()


def state_of_everything(model):
    session = current()
    kinds = [DEVICE.type, "cpu"]
    return [
        [(name, id(t), t.data_ptr(), t.dtype) for name, t in (*model.named_parameters(), *model.named_buffers())],
        [bits(t) for t in (*model.parameters(), *model.buffers())],
        [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in model.parameters()],
        [sorted(vars(m)) for m in model.modules()],
        [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()],
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        np.random.get_state()[1].tobytes(),
        [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
        torch.is_autocast_cache_enabled(),
        hooks_of_torch(),
        id(session),
        None if session is None else (len(session.models), session.casts.active, session.scaler_states()),
        [id(F.binary_cross_entropy), id(torch.autograd.backward), id(torch.Tensor.backward)],
    ]


# ---- the figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [Net, Tokens])
def test_functions_casts_and_memory_are_those_of_a_run(kind, level):
    model, batch, loss = made(kind)
    one = amp.debug.report(model, batch, loss=loss, levels=level).levels[level]
    model, optimizer, seen, saved = run(kind, level)
    calls = Counter()
    for function, n in one.tally.calls.items():
        if function.operator in COMPARED:
            calls[function.operator, function.dtype] += n
    casts, cast_bytes = Counter(seen.casts), Counter(seen.bytes)
    if VENDOR:
        for name, dtype in [key for key in (calls | seen.calls) if key[0] in ("addmm", "mm")]:
            del calls[name, dtype], seen.calls[name, dtype]  # or matmul, as it finds an input in memory
        # Its norms return gradients of weights in float32, and by the rules for sizes in the dtype of the weights.
        low, norms = LOW.get(level, torch.float16), NORMS.get((kind, level), 0)
        casts[torch.float32, low] -= norms
        cast_bytes[torch.float32, low] -= norms * 8 * (4 + 2)
        # Its masks of dropout have a bit for an element, in blocks of 128, and by the rules for sizes a byte.
        saved[torch.bool] += 2 * DROPPED[kind]
        saved[torch.uint8] -= 2 * 16 * math.ceil(DROPPED[kind] / 128)
    else:
        elements = STATISTICS[DEVICE.type].get((kind, level), 0)
        saved[torch.float32] += elements * 4
        saved[LOW.get(level, torch.float16)] -= elements * 2
    assert calls == seen.calls
    assert (one.tally.casts, one.tally.cast_bytes, set(one.tally.cast_weights)) == (+casts, +cast_bytes, seen.weights)
    assert one.tally.saved == +saved
    low = [p for p in model.parameters() if p.dtype != torch.float32 and level != "O3"]
    assert one.memory.masters.total() == 4 * sum(p.numel() for p in low)
    optimizer.zero_grad()
    backward(loss(model(batch)), optimizer)
    gradients = Counter()
    for param in model.parameters():
        gradients[param.grad.dtype] += param.grad.nbytes
    assert one.memory.gradients == gradients


WITH_STATES = {
    torch.optim.Adam: {},
    torch.optim.SGD: {"momentum": 0.9},
    torch.optim.RMSprop: {"centered": True},
    optimizers.NpuFusedAdam: {},
    optimizers.NpuFusedSGD: {"momentum": 0.9},
}


@pytest.mark.parametrize(("make", "level"), by_turns(WITH_STATES, [("O1",), ("O2",), ("O3",)]))
def test_the_state_is_that_of_the_optimizer(make, level):
    model, batch, loss = made(Net)
    options = WITH_STATES[make]
    optimizer = make(model.parameters(), lr=1e-3, **options)
    with pytest.raises(ValueError, match="has no state yet"):
        amp.debug.report(model, batch, loss=loss, levels=level, optimizer=optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    backward(loss(model(batch)), optimizer)
    optimizer.step()
    real = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    again = amp.debug.report(model, batch, loss=loss, levels=level, optimizer=optimizer)
    assert again.levels[level].memory.states == {make.__name__: real}


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 8), ({"state_dtype": torch.bfloat16}, 4), ({"state_dtype": "int8"}, 2 + 2 * 4 / 128)]
)
def test_states_in_fewer_bytes_are_counted(options, expected):
    model = nn.Linear(128, 8, bias=False).to(DEVICE)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-3, **options)
    batch = torch.ones(2, 128, device=DEVICE)
    model(batch).sum().backward()
    optimizer.step()
    found = amp.debug.report(model, batch, levels="O0", optimizer=optimizer)
    assert found.levels["O0"].memory.states["NpuFusedAdamW"] == pytest.approx(expected * 1024, abs=8)


def test_the_bytes_of_each_choice_are_those_of_the_rule():
    model, batch, loss = made(Net)

    def rows(optimizer):
        found = amp.debug.report(model, batch, levels="O0", optimizer=optimizer)
        lines = str(found).splitlines()
        begins = [i for i, line in enumerate(lines) if line.startswith("bytes of a parameter with ")]
        return [line.split()[-1] for line in lines[begins[0] + 2 : lines.index("", begins[0])]] if begins else []

    adam = ["16", "16", "14", "10", "8.06", "7.06", "18", "16", "8", "4"]
    assert rows(None) == adam
    for cls, options, expected in (
        (optimizers.NpuFusedLamb, {}, adam),
        (optimizers.NpuFusedAdam, {"amsgrad": True}, ["20", "20", "18", "12", "9.09", "8.09", "22", "20", "10", "4"]),
        (optimizers.NpuFusedSGD, {"momentum": 0.9}, ["12", "12", "10", "8", "7.03", "6.03", "14", "12", "6", "4"]),
        (torch.optim.Adam, {}, []),
    ):
        optimizer = cls(model.parameters(), lr=1e-3, **options)
        loss(model(batch)).backward()
        optimizer.step()
        assert rows(optimizer) == expected


def test_flops_of_attention_by_hand():
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    b, h, s, d = 2, 3, 16, 8
    qkv = [torch.randn(b, h, s, d, device=DEVICE, requires_grad=True) for _ in range(3)]
    report = amp.debug.report(Attention(), *qkv, levels="O4")
    tally = report.levels["O4"].tally
    if VENDOR:  # a kernel of its own
        assert any("attention" in note and "not counted" in note for note in report.notes)
        return
    product = 2 * b * h * s * s * d
    forward = sum(n for f, n in tally.flops.items() if f.phase == "forward")
    assert forward == 2 * product
    # A kernel of attention computes the scores once more.
    kernel = any("attention" in f.operator for f in tally.flops)
    assert sum(tally.flops.values()) - forward == (5 if kernel else 4) * product


@pytest.mark.parametrize("kind", [Net, Tokens])
def test_flops_are_those_of_torchs_counter(kind):
    model, batch, loss = made(kind)
    tally = amp.debug.report(model, batch, loss=loss, levels="O0").levels["O0"].tally
    model.cpu()  # torch has formulas of what matmul is composed of there, and none of torch_npu's own
    with FlopCounterMode(display=False) as counter:
        model(batch.cpu()).sum().backward()
    assert sum(tally.flops.values()) == counter.get_total_flops() > 0


def test_functions_have_the_names_of_their_modules():
    model, batch, loss = made(Net)
    found = amp.debug.report(model, batch, loss=loss, levels="O1")
    of_o1 = {(f.module, f.operator, f.phase): f.dtype for f in found.levels["O1"].tally.calls}
    assert of_o1["conv", "convolution", "forward"] == torch.float16
    assert of_o1["conv", "convolution_backward", "backward"] == torch.float16
    assert of_o1["blocks.1.norm", "native_layer_norm", "forward"] == torch.float32
    products = {of_o1.get(("blocks.1.mlp.0", name, "backward")) for name in ("mm", "matmul_backward")}
    assert products - {None} == {torch.float16}
    assert of_o1[None, "nll_loss_forward", "forward"] == torch.float32
    assert not [f for f in found.levels["O1"].tally.flops if f.module is None]


def test_registered_and_disabled_casts_count():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.low = nn.Linear(4, 4, device=DEVICE), nn.Linear(4, 4, device=DEVICE)

        def forward(self, x):
            with amp.disable_casts():
                x = self.wide(x)
            return widened(self.low(x))

    @amp.float_function
    def widened(x):
        return x * 2

    report = amp.debug.report(Kept(), torch.randn(2, 4, device=DEVICE), levels="O1")
    found = report.levels["O1"].tally
    dtypes = {(f.module, f.operator): f.dtype for f in found.calls if f.phase == "forward"}
    assert dtypes == {("wide", "addmm"): torch.float32, ("low", "addmm"): torch.float16, ("", "mul"): torch.float32}
    # Forward and the gradient of the weight; the input of the second layer has a gradient, too.
    assert [found.flops_in(dtype) for dtype in (torch.float32, torch.float16)] == [2 * 64, 3 * 64]
    assert "FLOPs that O1 keeps in float32, 40 %:" in str(report)


# ---- nothing changes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh():
    """The report of a model that amp does not know."""
    model, batch, loss = made(Net)
    return str(amp.debug.report(model, batch, loss=loss, levels=("O1", "O5")))


@pytest.mark.parametrize(
    "level", [None, "O1", "O2", *(pytest.param(level, marks=pytest.mark.sweep) for level in ("O0", "O3", "O4", "O5"))]
)
def test_everything_is_as_it_was(level, fresh):
    model, batch, loss = made(Net)
    if level is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=2.0, verbosity=0)
    loss(model(batch)).backward()
    before = state_of_everything(model)
    with torch.no_grad():
        found = amp.debug.report(model, batch, loss=loss, levels=("O1", "O5"))
    assert state_of_everything(model) == before
    assert str(found) == fresh
    assert (model(batch).dtype == torch.float32) is (level not in ("O1", "O4"))


def test_nothing_is_allocated_on_the_device():
    model, rows = nn.Linear(4, 4, device=DEVICE), 2**40
    found = amp.debug.report(model, torch.zeros(1, 4, device=DEVICE).expand(rows, 4), levels=("O0", "O2"))
    # Results would have 16 TB.
    assert found.levels["O2"].tally.flops_in(torch.float16) == 2 * (2 * rows * 4 * 4)


def test_what_watches_is_not_set_off():
    model, batch, loss = made(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    amp.debug.explain_overflows(after=1)
    try:
        for _ in range(2):  # the second one is watched
            before = amp.debug.scalars()
            amp.debug.report(model, batch, levels="O1")
            assert (amp.debug.scalars(), dispatch_modes()) == (before, [])
            backward(loss(model(batch)) * float("inf"), optimizer)
            optimizer.step()
        assert amp.debug.scalars()["amp/skipped_steps"] == 2
    finally:
        amp.debug.explain_overflows(None)


class Chosen(nn.Module):
    """The size of a result depends on values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x[x[:, 0] > 0]
        return self.drop(self.linear(x)) * random.random()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Chosen, r"Exception: aten\."),
        (lambda: nn.Linear(3, 4), "a and b must have same reduction dim"),
        (lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)), "the sparse gradient of 0.weight"),
    ],
)
def test_what_cannot_be_known_without_values(make, why):
    model = make().to(DEVICE)
    x = torch.ones(2, 4, device=DEVICE, dtype=torch.long if isinstance(model, nn.Sequential) else torch.float32)
    before = state_of_everything(model)
    with pytest.raises(RuntimeError, match=rf"without values \(.*{why}"):
        amp.debug.report(model, x, levels=("O0", "O1"))
    assert state_of_everything(model) == before


# ---- what is outside of the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("had", [False, True])
def test_gradients_that_the_loss_reaches_stay(had):
    torch.manual_seed(0)
    model, criterion = nn.Linear(4, 3).to(DEVICE), nn.Linear(3, 1).to(DEVICE)
    x = torch.randn(2, 4, device=DEVICE)
    every = [*model.parameters(), *criterion.parameters()]
    for param in every if had else []:
        param.grad = torch.full_like(param, 0.5)
    before = [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in every]

    def loss(y):
        return criterion(y.float()).mean() + sum(p.float().square().sum() for p in model.parameters())

    found = amp.debug.report(model, x, loss=loss, levels=("O0", "O2"))
    assert [None if p.grad is None else (id(p.grad), bits(p.grad)) for p in every] == before
    # The gradients of the copy count.
    assert found.levels["O2"].memory.gradients == {torch.float32: 4 * 15}
    found = amp.debug.report(model, x, loss=lambda y: criterion(y.float()).mean(), levels="O2")
    assert found.notes == []


def test_gradients_that_forward_reaches_stay():
    model = nn.Linear(4, 3).to(DEVICE)
    model.forward = lambda x: F.linear(x, model.weight)
    amp.debug.report(model, torch.ones(2, 4, device=DEVICE), levels="O0")
    assert model.weight.grad is None


def test_gradients_stay_where_backward_fails():
    model, criterion = nn.Linear(4, 3).to(DEVICE), nn.Linear(3, 1).to(DEVICE)

    def fail(grad):
        raise ArithmeticError("no gradient")

    def loss(y):
        y.register_hook(fail)
        return criterion(y.float()).sum()

    with pytest.raises(RuntimeError, match="ArithmeticError: no gradient"):
        amp.debug.report(model, torch.ones(2, 4, device=DEVICE), loss=loss, levels="O2")
    assert [p.grad for p in criterion.parameters()] == [None, None]


def test_tensors_with_values_are_not_written():
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(DEVICE)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEVICE)
    x = torch.randn(8, 4, device=DEVICE)
    center, steps, queue = (torch.ones(n, device=DEVICE) for n in ((4,), (), (8, 4)))
    every = [center, steps, queue, *teacher.state_dict().values()]
    before = [bits(t) for t in every]

    def loss(y):
        steps.add_(1)
        torch._foreach_mul_([center, queue], 2.0)
        center.mul_(0.9).add_(y.detach().float().mean(0), alpha=0.1)
        queue[:2] = y.detach()[:2].float()
        return (y - teacher(x) - center).square().mean()

    amp.debug.report(model, x, loss=loss, levels=("O0", "O2"))
    assert [bits(t) for t in every] == before


class Rotary(nn.Module):
    """A cache of the class."""

    cache: ClassVar = {}

    def forward(self, x):
        if x.shape[1] not in Rotary.cache:
            Rotary.cache[x.shape[1]] = torch.arange(x.shape[1], device=x.device).cos()
        return x * Rotary.cache[x.shape[1]]


# ---- models ----------------------------------------------------------------------------------------------------------


def test_arguments_by_name_and_results_in_containers():
    class Named(nn.Linear):
        def forward(self, *, values):
            return {"loss": super().forward(values).mean(), "count": 3}

    model = Named(4, 2, device=DEVICE)
    found = amp.debug.report(model, kwargs={"values": torch.ones(3, 4, device=DEVICE)}, levels="O2")
    assert found.levels["O2"].tally.flops_in(torch.float16) == 2 * (2 * 3 * 4 * 2)
    assert found.batch == ["float32 [3, 4]"]
    assert found.notes == ["no loss function was given, so none is counted"]


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    kind: str = "result"


class Batch:
    """An object with tensors, and with what has no copy."""

    def __init__(self, x):
        self.x, self.calls = x, 0


class Output(collections.OrderedDict):
    """A dict of a class of its own, as that of transformers."""


WRAPPERS = [
    *(Result, Batch, lambda y: Output(logits=y), lambda y: collections.UserDict(logits=y)),
    *(lambda y: collections.UserList([y, 3]), lambda y: {"a": [Result(y)]}),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_results_in_objects_get_gradients(wrap):
    class Wrapped(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    found = amp.debug.report(Wrapped(4, 2, device=DEVICE), torch.ones(3, 4, device=DEVICE), levels="O0")
    assert found.notes == ["no loss function was given, so none is counted"]
    assert found.levels["O0"].tally.flops.total() == 2 * (2 * 3 * 4 * 2)


def test_batches_that_are_objects_are_copied():
    class Taking(nn.Linear):
        def forward(self, batch, same, lock):
            assert batch.x is same
            assert lock is given
            batch.x.mul_(2)
            batch.calls += 1
            return super().forward(batch.x)

    given, x = threading.Lock(), torch.ones(3, 4, device=DEVICE)
    batch = Batch(x)
    found = amp.debug.report(Taking(4, 2).to(DEVICE), batch, x, given, levels=("O0", "O1"))
    assert found.batch == ["float32 [3, 4]"] * 2
    assert (batch.x is x, batch.calls, x.unique().tolist()) == (True, 0, [1.0])
    # The batch is not what forward keeps for backward.
    plain = amp.debug.report(nn.Linear(4, 2).to(DEVICE), x, levels="O0").levels["O0"].tally.saved
    assert found.levels["O0"].tally.saved == plain


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_is_lifted(made_inside):
    with torch.inference_mode(made_inside):
        model, x = nn.Linear(4, 2).to(DEVICE), torch.ones(3, 4, device=DEVICE)
    with torch.inference_mode():
        found = amp.debug.report(model, x, levels="O2")
        assert torch.is_inference_mode_enabled()
    assert found.levels["O2"].memory.gradients == {torch.float32: 4 * 10}
    assert found.levels["O2"].tally.flops_in(torch.float16) == 2 * (2 * 3 * 4 * 2)


def test_frozen_parameters():
    model = nn.Sequential(nn.Linear(4, 4, device=DEVICE), nn.Linear(4, 2, device=DEVICE))
    model[0].requires_grad_(False)
    x = torch.ones(3, 4, device=DEVICE)
    memory = amp.debug.report(model, x, levels="O2").levels["O2"].memory
    assert memory.masters == {torch.float32: 4 * 10}
    assert memory.states == {"SGD with momentum": 4 * 10, "Adam": 8 * 10}
    found = amp.debug.report(model.requires_grad_(False), x, levels="O2")
    assert "only forward is counted" in str(found)
    assert found.levels["O2"].memory.gradients.total() == 0


@pytest.mark.parametrize("wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_wrappers_are_taken_off(wrap):
    model, x = nn.Linear(4, 2, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    assert str(amp.debug.report(wrap(model), x)) == str(amp.debug.report(model, x))


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input():
    model, x = nn.Linear(4, 2, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    with pytest.raises(TypeError, match=r"takes a model, .* got function"):
        amp.debug.report(lambda x: x, x)
    with pytest.raises(RuntimeError, match="Unexpected optimization level 'O7'"):
        amp.debug.report(model, x, levels=("O1", "O7"))
    with pytest.raises(ValueError, match="levels is empty: pass some of O0, O1"):
        amp.debug.report(model, x, levels=())
    with pytest.raises(TypeError, match=r"loss must be .* got Tensor"):
        amp.debug.report(model, x, loss=x)
    for loss, got in ((lambda y: y, r"a tensor of torch.float32, \[3, 2\]"), (lambda y: 3.0, "float")):
        with pytest.raises(ValueError, match=f"loss must return a scalar.* got {got}"):
            amp.debug.report(model, x, loss=loss)
    with pytest.raises(ValueError, match="tensor of the batch is on meta"):
        amp.debug.report(model, x.to("meta"))
    with pytest.raises(ValueError, match="the model is on the meta device"):
        amp.debug.report(copy.deepcopy(model).to("meta"), x.to("meta"))
    with pytest.raises(RuntimeError, match=r"you do not need to call \.half\(\)"):
        amp.debug.report(copy.deepcopy(model).half(), x)
    with pytest.raises(RuntimeError, match="parameter weight has no shape yet"):
        amp.debug.report(nn.LazyLinear(3), x)


def test_bad_optimizers():
    model, x = nn.Linear(4, 2, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    with pytest.raises(TypeError, match=r"optimizer must be .* got float"):
        amp.debug.report(model, x, optimizer=0.1)
    other = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="this SGD steps no parameter of the model"):
        amp.debug.report(model, x, optimizer=other)


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_the_layers_of_a_stack_have_one_row():
    model, batch, loss = made(Tokens)
    text = str(amp.debug.report(model, batch, loss=loss))
    assert len([line for line in text.splitlines() if line.startswith("blocks.*.out  ")]) == 1
    row = next(line for line in text.splitlines() if line.startswith("blocks.*.norm  native_layer_norm"))
    assert row.split() == [
        *("blocks.*.norm", "native_layer_norm", "2", "float32", "float32", "float16", "float32", "bfloat16", "to"),
        "float16",
    ]


def test_rich_prints_the_same_cells():
    console = pytest.importorskip("rich.console").Console(width=200, record=True, file=io.StringIO())
    model, batch, loss = made(Net)
    found = amp.debug.report(model, batch, loss=loss, levels=("O1", "O2"))
    console.print(found)
    assert "".join(console.export_text().split()).replace("─", "") == "".join(str(found).split())


# ---- FLOPs and bytes against unfused computations ----------------------------------------------------------


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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="other devices have fused layers of their own")
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_what_recurrent_layers_save(make):
    steps, batch, hidden = 5, 4, 16
    layer, x = make(hidden, hidden), torch.randn(steps, batch, hidden)
    found = amp.debug.report(layer, x, loss=lambda y: y[0].mean(), levels=("O0", "O5"))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), x)}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    unfused = torch.backends.mkldnn.flags(enabled=False)
    with unfused, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)[0].mean()
    expected = sum(storage.nbytes() for address, storage in storages.items() if address not in known)
    single, half = (sum(level.tally.saved.values()) for level in found.levels.values())
    assert single == expected > steps * batch * 3 * hidden * 4  # three or four gates of each step
    assert 0.4 < half / single < 0.7


@pytest.mark.parametrize("library", [torch.backends.cudnn, torch.backends.mkldnn])
def test_fused_recurrent_layers_are_off_in_the_report_alone(library):
    is_enabled = {
        torch.backends.cudnn: torch._C._get_cudnn_enabled,
        torch.backends.mkldnn: torch._C._get_mkldnn_enabled,
    }[library]

    class Noted(nn.Module):
        def forward(self, x):
            seen.append(is_enabled())
            return x * 2

    seen, x = [], torch.randn(2, device=DEVICE, requires_grad=True)
    for enabled in (True, False):
        with library.flags(enabled=enabled):
            amp.debug.report(Noted(), x, levels="O0")
            assert is_enabled() == enabled
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


def test_the_first_forward_of_the_model(watching, capsys):
    model, batch, _ = made(Net)
    model(batch)  # without amp
    alone = nn.Linear(4, 4, device=DEVICE)
    model = amp.initialize(model, opt_level="O3", verbosity=0)
    alone(torch.ones(1, 4, device=DEVICE))
    with torch.no_grad():
        model(batch)
    assert capsys.readouterr().out == ""
    before = state_of_everything(model)[:8]
    for _ in range(2):
        model(batch)
    said = capsys.readouterr().out
    assert said.count("the script trains at O3") == 1
    assert said.startswith("Net, ")
    assert "O3*" not in said  # no column for overrides
    assert "O3: float16 weights" in said
    assert state_of_everything(model)[0] == before[0]


def test_a_model_that_cannot_be_reported_on(watching, capsys):
    calls = []

    class Once(nn.Linear):
        def forward(self, x):
            calls.append(x)
            if len(calls) > 1:
                raise RuntimeError("once alone")
            return super().forward(x)

    model = amp.initialize(Once(4, 4, device=DEVICE), opt_level="O0", verbosity=0)
    assert model(torch.ones(1, 4, device=DEVICE)).shape == (1, 4)
    assert "(RuntimeError: once alone)" in capsys.readouterr().out


def test_a_cache_has_values(watching, capsys, monkeypatch):
    monkeypatch.setattr(Rotary, "cache", {})
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4), Rotary()).to(DEVICE), opt_level="O1", verbosity=0)
    model(torch.ones(2, 4, device=DEVICE))
    assert type(Rotary.cache[4]) is torch.Tensor
    assert capsys.readouterr().out.startswith("Sequential, 20 parameters")


def test_a_script_without_a_model(watching, capsys):
    watching._script_ended()
    assert capsys.readouterr().out.startswith("--model-report: the script has ended before a model")


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
