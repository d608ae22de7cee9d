# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of a script's own: subclasses with another rule, and those with parameter groups inside."""

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE, communication_backend
from small_programs import (
    CASTING,
    LEVELS,
    WITH_MASTERS,
    Weights,
    X,
    assert_values,
    backward,
    initialize,
    levels,
    train_step,
    vector,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex_npu import amp, optimizers
from apex_npu._extension import extension

pytestmark = pytest.mark.host

MOVED = 10.0 - vector(*X).cpu()


class MovesByAHundred(optimizers.NpuFusedSGD):
    def _group_step(self, group_index):
        for p in self.param_groups[group_index]["params"]:
            p.data.sub_(100.0)


@pytest.mark.skipif(extension is None, reason="without the extension there are no remainders")
@pytest.mark.parametrize("cls", [MovesByAHundred, torch.optim.SGD])
def test_remainders_are_for_the_rules_of_this_package(cls):
    """A rule of a script computes in the dtype of the data, and would round."""
    model = Weights(10.0)
    optimizer = cls(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=f"{cls.__name__} cannot keep the remainders.*leave it out"):
        initialize(model, optimizer, "O2", store_param_remainders=True)
    assert_values(model.parameters(), 10.0)


class WithGroupStep:
    """A rule as a ``_group_step``: it writes, or replaces, what it finds by Apex's private names.

    It counts steps where Ascend's optimizers do, on combined states and on those of parameters.
    """

    replaces = False

    def _group_step(self, index):
        group = self.param_groups[index]
        stash = self._amp_stash
        for p in group["params"]:
            if p.grad is not None:
                self.state[p]["step"] += 1
        for param, grad, state in zip(
            stash.combined_params_indexed_by_group[index],
            stash.combined_grads_indexed_by_group[index],
            stash.combined_param_states_indexed_by_group[index],
            strict=True,
        ):
            if param is None or grad is None:
                continue
            state["step"] += 1
            m = state["exp_avg"].lerp(grad, 0.5)
            new = param - group["lr"] * state["step"] * m
            if self.replaces:
                param.data, state["exp_avg"] = new, m
            else:
                param.data.copy_(new)
                state["exp_avg"].copy_(m)


class Writes(WithGroupStep, optimizers.NpuFusedAdam):
    pass


class Replaces(Writes):
    replaces = True


@levels(LEVELS)
@pytest.mark.parametrize("cls", [Writes, Replaces])
def test_a_group_step_finds_combined_tensors(cls, level):
    model = Weights(10.0, 20.0, 30.0)
    groups = [{"params": model.w[:2]}, {"params": model.w[2:], "lr": 0.5}]
    _, optimizer = initialize(model, cls(groups, lr=1.0), level)
    for only in ((0, 1, 2), (0, 2), (0, 2)):
        train_step(model, optimizer, only=only)
    # The gradient is x in each step: m is x/2, 3x/4, 7x/8.
    x = vector(*X).cpu()
    thrice = (1 * 0.5 + 2 * 0.75 + 3 * 0.875) * x
    params = [p for group in optimizer.param_groups for p in group["params"]]
    expected = 10.0 - thrice, 20.0 - 0.5 * x, 30.0 - 0.5 * thrice
    assert_values(model.state_dict().values(), *expected)
    assert_values(params, *[value.to(w.dtype) for value, w in zip(expected, model.w, strict=True)])
    assert [float(optimizer.state[p]["step"]) for p in params] == [3, 1, 3]
    assert_values([optimizer.state[p]["exp_avg"] for p in params], 0.875 * x, 0.5 * x, 0.875 * x)
    assert not hasattr(optimizer._amp_stash, "combined_params_indexed_by_group")


class SubtractsGradients(optimizers.NpuFusedSGD):
    def _group_step(self, index):
        for p in self.param_groups[index]["params"]:
            p.data.sub_(p.grad)


def test_a_group_step_reads_gradients_that_a_grad_scaler_has_unscaled():
    model = Weights(10.0)
    optimizer = SubtractsGradients(model.parameters(), lr=0.1, fuse_grad_scaler=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=64.0)
    scaler.scale(model(vector(*X))).backward()
    scaler.step(optimizer)
    assert_values(model.parameters(), MOVED)


def test_a_group_step_is_called_after_a_before_updates_of_the_same_class():
    class Both(MovesByAHundred):
        calls = 0

        def before_updates(self, runs):
            self.calls += 1

        def _group_step(self, index):
            super()._group_step(index)

    model = Weights(10.0)
    optimizer = Both(model.parameters(), lr=0.1)
    model(vector(*X)).backward()
    optimizer.step()
    assert optimizer.calls == 1
    assert_values(model.parameters(), -90.0)


def test_a_group_step_that_comes_too_late_is_refused():
    class Late(optimizers.NpuFusedSGD):
        pass

    Late._group_step = MovesByAHundred._group_step
    with pytest.raises(TypeError, match="Late has a _group_step that was assigned after the class was made"):
        Late(Weights(10.0).parameters(), lr=0.1)


def test_a_group_step_with_capturable_is_refused():
    with pytest.raises(TypeError, match="MovesByAHundred has a _group_step, which counts steps on the host"):
        MovesByAHundred(Weights(10.0).parameters(), lr=0.1, capturable=True)


class WithBoth(WithGroupStep, optimizers.NpuFusedAdam):
    """Its update goes before its group step."""

    def update(self, run, group):
        run.param.sub_(100.0)


def test_a_group_step_that_fails_counts_no_step():
    class Fails(optimizers.NpuFusedAdam):
        def _group_step(self, index):
            raise KeyError("wrong")

    model = Weights(10.0)
    _, optimizer = initialize(model, Fails(model.parameters(), lr=0.1), "O2")
    with pytest.raises(KeyError, match="wrong"):
        train_step(model, optimizer)
    assert_values(model.parameters(), 10.0)
    assert not any("step" in entry for entry in optimizer.state.values())


@levels(("O0", *CASTING, "O2"))
def test_a_parameter_exchanged_in_its_group_and_in_the_stash(level):
    """As scripts with a partial fully connected layer do in each step, with its momentum."""
    model = Weights(10.0)
    fc = torch.nn.Parameter(vector(1.0, 1.0, 1.0))
    backbone = optimizers.NpuFusedSGD(model.parameters(), lr=1.0)
    inner = torch.optim.SGD([fc], lr=1.0, momentum=0.5)
    options = {"combine_grad": True} if level != "O0" else {}
    _, (backbone, inner) = initialize(model, [backbone, inner], level, **options)
    inner.accelerate = False
    centers, momentum = vector(4.0, 8.0, 16.0).expand(2, 3).clone(), torch.zeros(2, 3, device=DEVICE)
    for i in (0, 1, 0):
        active = torch.nn.Parameter(centers[i].clone())
        activated = momentum[i].clone()
        inner.state.pop(inner.param_groups[-1]["params"][0], None)
        inner.param_groups[-1]["params"][0] = active
        if hasattr(inner._amp_stash, "all_fp32_params"):
            inner._amp_stash.all_fp32_params[-1] = active
        inner.state[active]["momentum_buffer"] = activated
        backward(model(vector(*X)) + (active * vector(*X)).sum(), [backbone, inner])
        backbone.step()
        inner.step()
        backbone.zero_grad()
        inner.zero_grad()
        centers[i], momentum[i] = active.detach(), activated
    x = vector(*X).cpu()
    assert_values(
        [centers], torch.stack([vector(4.0, 8.0, 16.0).cpu() - x - 1.5 * x, vector(4.0, 8.0, 16.0).cpu() - x])
    )
    assert_values(model.parameters(), 10.0 - 3 * x)


class OwnRule(optimizers.NpuFusedSGD):
    def update(self, run, group):
        run.param.sub_(2.0**-12)


@levels(("O0", "O1", "O2", "O5"))
def test_a_subclass_with_an_update_of_its_own_computes_in_float32(level):
    model = Weights(10.0)
    _, optimizer = initialize(model, OwnRule(model.parameters(), lr=0.1), level)
    for _ in range(2):
        train_step(model, optimizer)
    assert_values(model.state_dict().values(), 10.0 - 2.0**-11)


class CopyOfAscends(torch.optim.SGD):
    is_npu_fused_optimizer = True


class WholeCopyOfAscends(CopyOfAscends):
    @torch.no_grad()
    def step(self, closure=None):
        self._check_already_combined_params_and_grads()
        self._combine_params_and_grads_by_group()


@levels(LEVELS)
def test_a_whole_copy_of_ascends_optimizers_is_refused_by_name(level):
    model = Weights(10.0)
    _, optimizer = initialize(model, WholeCopyOfAscends(model.parameters(), lr=1.0), level)
    with pytest.raises(TypeError, match=r"WholeCopyOfAscends is a copy .* Import the one of apex.optimizers instead"):
        train_step(model, optimizer)
    assert_values(model.parameters(), 10.0)


class Both(torch.optim.Optimizer):
    """One optimizer over two, with a group of its own for all of their parameters."""

    def __init__(self, *inner):
        self.inner = inner
        super().__init__(self.all_params(), {})

    def all_params(self):
        return [p for optimizer in self.inner for group in optimizer.param_groups for p in group["params"]]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


class SharesGroups(Both):
    """An optimizer over two others, which shares their groups."""

    def all_params(self):
        return [group for optimizer in self.inner for group in optimizer.param_groups]


# Optimizers of these parameters, and what one step makes of 10.
OWN = {
    "a group step": (lambda params: MovesByAHundred(params, lr=0.1), -90.0),
    "a group step that reads gradients": (lambda params: SubtractsGradients(params, lr=0.1), MOVED),
    "an update and a group step": (lambda params: WithBoth(params, lr=0.1), -90.0),
    "marked as fused": (lambda params: CopyOfAscends(params, lr=1.0), MOVED),
    "one over two": (lambda params: Both(*[torch.optim.SGD([w], lr=1.0) for w in params]), MOVED),
    "one over two fused": (lambda params: Both(*[optimizers.NpuFusedSGD([w], lr=1.0) for w in params]), MOVED),
    "sharing groups": (lambda params: SharesGroups(*[torch.optim.SGD([w], lr=1.0) for w in params]), MOVED),
}


@pytest.mark.parametrize("fuse_unscale", [False, True])
@levels(LEVELS)
@pytest.mark.parametrize("own", OWN)
def test_a_step(own, level, fuse_unscale):
    make, expected = OWN[own]
    model = Weights(10.0, 10.0)
    _, optimizer = initialize(model, make(list(model.parameters())), level, fuse_unscale=fuse_unscale)
    train_step(model, optimizer)
    assert_values(model.parameters(), expected, expected)


@pytest.fixture
def alone():
    """A process group of this process."""
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group(communication_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@levels(LEVELS)
def test_zero_redundancy_optimizer(level):
    model = Weights(10.0)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    train_step(model, initialize(model, zero, level)[1])
    assert_values(model.parameters(), MOVED)


@pytest.mark.usefixtures("alone")
@levels(WITH_MASTERS)
def test_zero_redundancy_optimizer_with_views_of_buckets_is_refused(level):
    model = Weights(10.0)
    options = {"parameters_as_bucket_view": True, "lr": 1.0}
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    for given in (zero, zero.optim):
        with pytest.raises(RuntimeError, match="Remove parameters_as_bucket_view"):
            initialize(model, given, level)
    assert_values(model.parameters(), 10.0)


# Optimizers that step by another inside of them


class TwoSteps(torch.optim.Optimizer):
    """As SAM publishes it: the second step is one of the base optimizer."""

    def __init__(self, base_optimizer):
        super().__init__(base_optimizer.param_groups, {})
        self.base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad)

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    def step(self, closure=None):
        self.base_optimizer.step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.mul_(2.0)


bases = pytest.mark.parametrize("base", [torch.optim.SGD, optimizers.NpuFusedSGD])


def over(base, level, **options):
    model = Weights(10.0)
    return initialize(model, TwoSteps(base(model.parameters(), lr=1.0)), level, **options)


@bases
@levels(LEVELS)
def test_a_step_of_the_optimizer_inside_is_one_of_amps(level, base):
    model, optimizer = over(base, level)
    for _ in range(2):
        backward(model(vector(*X)), optimizer)
        optimizer.base_optimizer.step()
        optimizer.base_optimizer.zero_grad()
    assert_values(model.parameters(), 10.0 - 2 * vector(*X).cpu())
    assert amp.last_step(optimizer).applied


@bases
@levels(LEVELS)
def test_an_overflow_skips_the_step_of_the_optimizer_inside(level, base):
    model, optimizer = over(base, level, loss_scale="dynamic", dynamic_init_scale=16.0)
    for x in ((torch.inf, 1.0, 1.0), X):
        for step in (optimizer.first_step, optimizer.second_step):
            backward(model(vector(*x)), optimizer)
            step()
            optimizer.zero_grad()
        assert amp.last_step(optimizer).applied == (x is X)
    assert_values(model.parameters(), MOVED)


@bases
@levels(LEVELS)
def test_a_step_that_calls_the_one_inside_is_one_step(level, base):
    model, optimizer = over(base, level, loss_scale="dynamic", dynamic_init_scale=16.0)
    for x in ((torch.inf, 1.0, 1.0), X):
        train_step(model, optimizer, x)
    assert_values(model.parameters(), 2 * MOVED)
    report = amp.last_step(optimizer)
    assert (report.applied, report.skipped_steps, report.scale_before) == (True, 1, 8.0)


@levels(WITH_MASTERS)
def test_an_initialize_that_fails_gives_the_optimizer_inside_back(level):
    model = Weights(10.0)
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = TwoSteps(base)
    with pytest.raises(RuntimeError, match=r"should only be passed through amp\.initialize once"):
        initialize(model, [optimizer, optimizer], level)
    assert (type(optimizer), type(base)) == (TwoSteps, torch.optim.SGD)
    model, optimizer = initialize(model, optimizer, level)
    train_step(model, optimizer)
    assert_values(model.parameters(), 2 * MOVED)
