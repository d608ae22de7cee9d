# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moving averages, FusedEMA's and those that hosts make of a deep copy, read float32 values.

A model that is copied alone is float32, with the model's float32 values and without casts.
"""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.fx
from devices import DEVICE
from small_programs import (
    LEVELS,
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    backward,
    initialize,
    kinds,
    known_fault,
    levels,
    saved_and_loaded,
    start,
    step_on,
    train_step,
    values,
    vector,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from apex_npu import amp, optimizers
from apex_npu.autocast.submodule_cast import CastInputs

pytestmark = pytest.mark.host

EXACT = 1.0 + 2.0**-20  # no half, and no bfloat16
STEP = 2.0**-18


def trained(level, kind="fused", steps=1):
    model, optimizer = start(Weights(EXACT), kind=kind, level=level, lr=STEP)
    for _ in range(steps):
        train_step(model, optimizer, (1.0, 1.0, 1.0))
    return model, optimizer


@levels(WITH_MASTERS)
@kinds(("torch", "fused"))
def test_fused_ema_averages_float32_values(kind, level):
    model, optimizer = trained(level, kind)
    ema = optimizers.FusedEMA(model, decay=0.5)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    ema.update()
    assert_values(ema.state_dict()["averages"].values(), EXACT - 1.5 * STEP)


# The last ones are halfway between two numbers of float16, and of bfloat16.
@pytest.mark.parametrize("average", [EXACT + STEP, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
@levels(WITH_MASTERS)
@kinds(("torch", "fused"))
@pytest.mark.filterwarnings("error")
def test_averages_are_swapped_in_and_out_exactly(kind, level, average):
    model, optimizer = trained(level, kind)
    own = EXACT - STEP
    ema = optimizers.FusedEMA(model, decay=0.5)
    ema.load_state_dict({"decay": 0.5, "averages": {"w.0": torch.full((3,), average)}})
    for _ in range(2):
        with ema.swapped():
            assert_values([model.state_dict()["w.0"]], average)
            torch.testing.assert_close(model.w[0].detach().float().cpu(), torch.full((3,), average), rtol=2**-8, atol=0)
        train_step(model, optimizer, (1.0, 1.0, 1.0))
        own -= STEP
        assert_values([model.state_dict()["w.0"]], own)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}
copies = pytest.mark.parametrize("how", COPIES)


@levels(WITH_MASTERS)
def test_an_average_written_through_the_state_dict_of_a_copy_moves(level):
    model, optimizer = trained(level)
    twin = copy.deepcopy(model)
    for _ in range(2):
        train_step(model, optimizer, (1.0, 1.0, 1.0))
        with torch.no_grad():
            for mine, value in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
                mine.copy_(0.5 * mine + 0.5 * value)
    # From 1 step: half way to 2, and from there half way to 3.
    assert_values(twin.state_dict().values(), EXACT - 2.25 * STEP)


@levels(LEVELS)
@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("loop", [list, next], ids=["ended", "left early"])
@copies
def test_an_optimizer_is_copied_after_a_loop_over_master_params(how, loop, kind, level):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    steps = amp.master_params(optimizer)
    loop(steps)
    model, optimizer = COPIES[how]((model, optimizer))
    train_step(model, optimizer)
    assert_values(model.state_dict().values(), 1.0 - torch.tensor(X))


def copied(level, kind, how, trains, value):
    """A copy of a model and its optimizer, maybe after a step."""
    model, optimizer = COPIES[how](start(Weights(value), kind=kind, level=level))
    if trains:
        train_step(model, optimizer, (0.0, 0.0, 0.0))
    return model, optimizer


def for_copies(test):
    for mark in (levels(WITH_MASTERS), kinds(("torch", "fused")), copies, pytest.mark.parametrize("trains", [0, 1])):
        test = mark(test)
    return test


@for_copies
def test_writes_to_the_state_dict_of_a_copy_are_its_weights(level, kind, how, trains):
    model, optimizer = copied(level, kind, how, trains, 1.0)
    model.state_dict()["w.0"].fill_(EXACT)
    assert model(vector(1.0, 1.0, 1.0)).item() == 3.0
    model.state_dict()["w.0"].fill_(2.0)
    assert model(vector(1.0, 1.0, 1.0)).item() == 6.0
    train_step(model, optimizer)
    assert_values(model.state_dict().values(), 2.0 - torch.tensor(X))


@for_copies
def test_float32_data_that_is_assigned_to_a_copy_is_its_value(level, kind, how, trains):
    model, _ = copied(level, kind, how, trains, 1.0)
    model.w[0].data = torch.full_like(model.w[0], EXACT, dtype=torch.float32)
    model(vector(*X))
    assert model.w[0].dtype != torch.float32
    assert_values(model.state_dict().values(), EXACT)


@for_copies
def test_a_loop_over_the_masters_of_a_copy_that_is_left_early_ends_with_the_next_forward(level, kind, how, trains):
    model, optimizer = copied(level, kind, how, trains, EXACT)
    steps = amp.master_params(optimizer)
    next(steps)
    model(vector(*X))
    assert model.w[0].dtype != torch.float32


@for_copies
def test_weights_that_are_unfrozen_in_a_copy_begin_with_their_float32_values(level, kind, how, trains):
    model = Weights(EXACT, EXACT)
    model.w[1].requires_grad_(False)
    model, optimizer = COPIES[how](start(model, kind=kind, level=level, lr=STEP))
    if trains:
        train_step(model, optimizer, (0.0, 0.0, 0.0))
    model.w[1].requires_grad_(True)
    train_step(model, optimizer)
    assert_values(model.state_dict().values(), *[EXACT - STEP * torch.tensor(X)] * 2)
    saved = {name: value + STEP for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    assert_values(model.state_dict().values(), *values(saved.values()))


@for_copies
def test_shutdown_makes_copies_float32(level, kind, how, trains):
    model, optimizer = copied(level, kind, how, trains, EXACT)
    amp.shutdown()
    assert_values(model.parameters(), EXACT)
    assert model.w[0].dtype == torch.float32
    model(vector(*X)).backward()
    with pytest.raises(RuntimeError, match=r"amp\.shutdown"):
        optimizer.step()


@levels(WITH_MASTERS)
@copies
def test_a_copy_that_is_loaded_before_initialize_is_known_after_its_first_block(how, level):
    pair = start(Weights(1.0), level=level)
    saved = pickle.dumps(pair)
    amp.shutdown()
    model, optimizer = COPIES[how](pickle.loads(saved))
    start(Weights(1.0), level=level)
    train_step(model, optimizer, (0.0, 0.0, 0.0))
    model.state_dict()["w.0"].fill_(EXACT)
    assert model(vector(1.0, 1.0, 1.0)).item() == 3.0
    amp.shutdown()
    assert_values(model.parameters(), EXACT)


@levels(WITH_MASTERS)
@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_a_shallow_copy_of_an_optimizer_leaves_its_masters(kind, level):
    model, optimizer = start(Weights(EXACT), kind=kind, level=level)
    copy.copy(optimizer)
    gc.collect()
    with amp.float32_params(optimizer):
        assert_values(model.parameters(), EXACT)
    train_step(model, optimizer)
    assert_values(model.state_dict().values(), EXACT - torch.tensor(X))


@pytest.mark.parametrize(
    ("level", "how"),
    [
        *(("O0", "deepcopy"), ("O2", "deepcopy"), ("O2", "pickle"), ("O5", "deepcopy"), ("O5", "pickle")),
        pytest.param("O0", "pickle", marks=known_fault("a model without masters is not known after a pickle")),
    ],
)
def test_copies_are_not_cast_under_another_models_o1(level, how):
    """LayerNorm computes in float32 at O1."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(DEVICE)
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    x = torch.randn(4, 8, device=DEVICE)
    step_on(model(x).float().sum(), optimizer)
    other = nn.Linear(8, 8).to(DEVICE)
    initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), "O1")
    twin, _ = COPIES[how]((model, optimizer))
    assert torch.equal(twin(x), model(x))


@levels(LEVELS)
@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}], ids=["mean", "ema"])
def test_torchs_averaged_model_is_float32(options, level):
    """Over two weights between which the model's dtype has nothing."""
    eps = torch.finfo({"O2": torch.float16}.get(level, torch.bfloat16)).eps
    model, optimizer = start(Weights(1.0), level=level, lr=eps)
    average = AveragedModel(model, **options)
    for _ in range(2):
        average.update_parameters(model)
        train_step(model, optimizer, (-1.0, -1.0, -1.0))
    assert_values([average.module.state_dict()["w.0"]], 1.0 + 0.5 * eps)


class Mixed(nn.Module):
    """Trained and frozen parameters, tied ones, buffers, and a batch norm that stays in float32."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Parameter(torch.full((4,), EXACT), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), EXACT))

    def forward(self, x):
        h = self.rnn(self.encoder(x)[None])[0][0]
        return self.tied(self.head(h)) * self.frozen * self.scale


def mixed(level="O2"):
    torch.manual_seed(0)
    model = Mixed().to(DEVICE)
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), level)
    step_of_mixed(model, optimizer)
    return model, optimizer


def inputs():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def step_of_mixed(model, optimizer):
    step_on(model(inputs()).float().square().sum(), optimizer)


COPIES_AND_FILES = {**COPIES, "torch.save": saved_and_loaded}
copies_and_files = pytest.mark.parametrize("how", COPIES_AND_FILES)


def assert_alone(twin, model):
    """Float32, as ``state_dict`` shows the model, with nothing of amp but the hook that widens inputs."""
    shown = model.state_dict()
    assert {t.dtype for t in twin.state_dict().values() if t.is_floating_point()} == {torch.float32}
    for name, t in twin.state_dict(keep_vars=True).items():
        assert torch.equal(t, shown[name])
    for module in twin.modules():
        assert not {"forward", "__reduce_ex__", "_replicate_for_data_parallel"} & set(vars(module))
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks
        assert not any(isinstance(hook, CastInputs) for hook in module._forward_pre_hooks.values())


@levels((*WITH_MASTERS, "O3"))
@copies_and_files
def test_every_tensor_of_a_copy_alone_is_float32(how, level):
    model, _ = mixed(level)
    twin = COPIES_AND_FILES[how](model)
    assert_alone(twin, model)
    assert twin.tied.weight is twin.head.weight
    assert all(any(w is p for p in twin.rnn.parameters()) for w in twin.rnn._flat_weights)
    reference = Mixed().to(DEVICE)
    reference.load_state_dict(twin.state_dict())
    for x in (inputs(), inputs().to(model.head.weight.dtype)):
        torch.testing.assert_close(twin(x), reference(x.float()), rtol=0.0, atol=0.0)
    assert model(inputs()).dtype == torch.float32
    assert {p.dtype for p in model.head.parameters()} != {torch.float32}


PARTS = {
    **{name: lambda model, name=name: getattr(model, name) for name in ("encoder", "rnn", "head")},
    "around": lambda model: nn.ModuleDict({"model": model}),
}


@levels(WITH_MASTERS)
@copies_and_files
@pytest.mark.parametrize("part", PARTS)
def test_what_is_copied_without_its_model_or_around_it_is_float32(part, how, level):
    model, _ = mixed(level)
    alone = PARTS[part](model)
    twin = COPIES_AND_FILES[how](alone)
    assert_alone(twin, alone)
    if part == "around":
        assert twin["model"](inputs().to(model.head.weight.dtype)).dtype == torch.float32


@levels(WITH_MASTERS)
def test_a_submodule_is_copied_without_its_model(level):
    model, _ = mixed(level)
    memo = {}
    copy.deepcopy(model.encoder, memo)
    assert id(model) not in memo
    saved = io.BytesIO()
    torch.save(model.encoder, saved)
    assert b"Linear" in saved.getvalue()
    assert b"Mixed" not in saved.getvalue()


@pytest.mark.pairwise
@levels((*WITH_MASTERS, "O3"))
@copies_and_files
@pytest.mark.parametrize("order", ["model first", "optimizer first", "the model holds it"])
def test_copies_that_are_made_together_train_like_the_originals(order, how, level):
    model, optimizer = mixed(level)
    if order == "model first":
        twin, other = COPIES_AND_FILES[how]((model, optimizer))
    elif order == "optimizer first":
        other, twin = COPIES_AND_FILES[how]([optimizer, model])
    else:
        model.optimizer = optimizer
        twin = COPIES_AND_FILES[how](model)
        other = twin.optimizer
    for a, b in zip(twin.state_dict(keep_vars=True).values(), model.state_dict(keep_vars=True).values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip([*twin.parameters(), *twin.buffers()], [*model.parameters(), *model.buffers()], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    step_of_mixed(model, optimizer)
    step_of_mixed(twin, other)
    for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    vars(twin).pop("optimizer", None)
    assert_alone(copy.deepcopy(twin), twin)


@levels(WITH_MASTERS)
def test_a_copy_alone_is_initialized_and_trained_by_itself(level):
    model, _ = mixed(level)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    twin = copy.deepcopy(model)
    twin, other = initialize(twin, torch.optim.SGD(twin.parameters(), lr=0.1), level)
    step_of_mixed(twin, other)
    assert not torch.equal(twin.state_dict()["head.weight"], before["head.weight"])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def traced(model):
    return torch.fx.symbolic_trace(model)


def compiled(model):
    return torch.compile(model, backend="eager")


@levels(WITH_MASTERS)
@pytest.mark.parametrize("wrap", [traced, compiled])
def test_copies_of_traced_and_compiled_models_are_float32(wrap, level):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(DEVICE))
    model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    step_of_mixed(model, optimizer)
    twin = copy.deepcopy(model)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(twin(inputs()), model(inputs()), rtol=2e-2, atol=2e-2)


@levels(WITH_MASTERS)
def test_an_average_of_all_tensors_by_torch(level):
    model, optimizer = mixed(level)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    expected = {name: t.double() for name, t in model.state_dict().items()}
    for _ in range(3):
        step_of_mixed(model, optimizer)
        average.update_parameters(model)
        for name, t in model.state_dict().items():
            expected[name] = 0.5 * expected[name] + 0.5 * t.double() if t.is_floating_point() else t
    for name, t in average.module.state_dict().items():
        if t.is_floating_point():
            torch.testing.assert_close(t.double(), expected[name], rtol=1e-6, atol=1e-7)


@levels(WITH_MASTERS)
def test_a_shallow_copy_leaves_the_original_as_it_is(level):
    model, optimizer = trained(level)
    before = [p.dtype for p in model.parameters()]
    twin = copy.copy(model)
    assert [p.dtype for p in model.parameters()] == before
    assert all(p is q for p, q in zip(twin.parameters(), model.parameters(), strict=True))
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values(model.state_dict().values(), EXACT - 2 * STEP)


@levels(WITH_MASTERS)
@kinds(("torch", "fused", "fuse_unscale"))
@pytest.mark.parametrize("by", ["shutdown", "a second initialize"])
@pytest.mark.parametrize("in_block", [False, True])
def test_a_step_of_an_optimizer_that_has_lost_its_model_is_refused(level, kind, by, in_block):
    model, optimizer = trained(level, kind)
    if in_block:
        backward(model(torch.ones(3, device=DEVICE)), optimizer)
    if by == "shutdown":
        amp.shutdown()
    else:
        initialize(model, torch.optim.SGD(model.parameters(), lr=STEP), level)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = values(model.parameters())
    with pytest.raises(RuntimeError, match=r"step\(\) was called with .*SGD, whose float32 values no model has"):
        optimizer.step()
    assert all(map(torch.equal, values(model.parameters()), before))


@levels(WITH_MASTERS)
def test_a_second_initialize_begins_without_scaled_gradients(level):
    model, optimizer = start(Weights(EXACT), level=level, lr=STEP, loss_scale=1024.0)
    backward(model(torch.ones(3, device=DEVICE)), optimizer)
    optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    model, optimizer = initialize(model, optimizer, level)
    backward(model(torch.ones(3, device=DEVICE)), optimizer)
    assert_values([p.grad for p in amp.master_params(optimizer)], 1.0)
