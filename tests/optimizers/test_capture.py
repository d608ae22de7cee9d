# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``capturable``: a step that is replayed is the reference's next one; what no replay could do is refused."""

import copy
import warnings
import weakref

import pytest
import torch
from captures import Capture
from devices import DEVICE, SIMULATOR, needs_counts
from lockstep import assert_equal_params, make_params
from optimizer_specs import SPECS
from torch import nn

from apex_npu import optimizers
from apex_npu.optimizers.capture import outside_of_graphs

pytestmark = pytest.mark.device

ON_HOST = DEVICE.type == "cpu"
needs_device = pytest.mark.skipif(ON_HOST, reason="on a CPU steps are counted by the host, and nothing is captured")
CAPTURABLE = [spec for spec in SPECS if spec.cls.supports_capture]
SHAPES = [(5, 7), (7,), (2, 3, 3, 3), (300,)]


def params(device="cpu"):
    return make_params(SHAPES, seed=1, device=device)


def grads(seed):
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give(params, seed, without=()):
    """New gradients, in the same memory where there are any; none for those ``without``."""
    for index, (p, grad) in enumerate(zip(params, grads(seed), strict=True)):
        if index in without:
            p.grad = None
        elif p.grad is None:
            p.grad = grad.to(p.device)
        else:
            p.grad.copy_(grad)


class Pair:
    """A capturable optimizer on the device and its reference on the CPU, in lockstep."""

    def __init__(self, spec, options):
        self.ours, self.theirs = params(DEVICE), params()
        self.reference = spec.reference(self.theirs, **options)
        lr = torch.tensor(self.reference.param_groups[0]["lr"], device=DEVICE)
        self.optimizer = spec.cls(self.ours, **{**options, "lr": lr}, capturable=True)

    def step(self, seed, do=None, without=()):
        give(self.ours, seed, without)
        give(self.theirs, seed, without)
        (do or self.optimizer.step)()
        self.reference.step()

    def capture(self, seed, without=()):
        graph = Capture()

        def step():
            with graph:
                self.optimizer.step()
            graph.replay()

        self.step(seed, step, without)
        return graph

    def set_lr(self, lr):
        self.optimizer.param_groups[0]["lr"].fill_(lr)
        self.reference.param_groups[0]["lr"] = lr

    def check(self):
        assert_equal_params(self.ours, self.theirs, 1e-5)
        for p, q in zip(self.ours, self.theirs, strict=True):
            if "step" in self.optimizer.state[p]:
                assert self.optimizer.state[p]["step"].device == p.device
                assert self.optimizer.state[p]["step"].item() == float(self.reference.state[q]["step"])


@needs_device
@pytest.mark.parametrize("spec", CAPTURABLE, ids=str)
def test_a_replayed_step_is_the_next_step_with_the_learning_rate_of_then(spec):
    for options in spec.variants:
        pair = Pair(spec, options)
        for seed in range(2):
            pair.step(seed)
        graph = pair.capture(2)
        for seed in range(3, 6):
            pair.set_lr(1e-3 * seed)
            pair.step(seed, graph.replay)
        pair.check()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("spec", CAPTURABLE, ids=str)
def test_a_graph_of_a_gpu_steps_like_the_reference(spec):
    pair = Pair(spec, spec.variants[-1])
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for seed in range(3):
            pair.step(seed)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair.optimizer.step()
    for seed in range(3, 6):
        pair.set_lr(1e-3 * seed)
        pair.step(seed, graph.replay)
    pair.check()


@needs_device
def test_counts_that_replays_have_parted_are_not_taken_for_the_same():
    """Those of the second parameter and of the others have met before, and part again without the host."""
    pair = Pair(CAPTURABLE[1], {"lr": 0.01})
    assert isinstance(pair.optimizer, optimizers.NpuFusedAdam)
    pair.step(0)
    pair.step(1, without=(0, 2, 3))
    pair.step(2, without=(1,))
    graph = pair.capture(3, without=(1,))
    for seed in range(4, 6):
        pair.step(seed, graph.replay, without=(1,))
    pair.step(6)
    with pytest.warns(RuntimeWarning, match="Do not replay that graph"):
        pair.step(7, without=(0, 2))
    graph = pair.capture(8, without=(0, 2))
    pair.step(9, graph.replay, without=(0, 2))
    pair.step(10)
    assert [pair.optimizer.state[p]["step"].item() for p in pair.ours] == [7, 7, 7, 10]
    pair.check()


@needs_device
def test_what_a_graph_reads_outlives_another_cut():
    pair = Pair(next(spec for spec in CAPTURABLE if spec.cls is optimizers.NpuFusedLamb), {"lr": 0.01})

    def tables():
        (group,) = pair.optimizer.fused_groups()
        return weakref.ref(group.runs.current[0].segments().starts)

    pair.step(0)
    eager = tables()
    pair.step(1, without=(1,))
    captured = tables()
    graph = pair.capture(2, without=(1,))
    pair.step(3)
    del graph
    assert eager() is None
    assert captured() is not None


@needs_device
def test_a_graph_that_steps_together_what_is_stepped_apart_is_warned_of():
    pair = Pair(CAPTURABLE[1], {"lr": 0.01})
    pair.step(0)
    pair.step(1, without=(1,))
    pair.capture(2, without=(1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(3, without=(0, 2, 3))
        pair.step(4)
    with pytest.warns(RuntimeWarning, match="graph steps together have no gradient now.*capture a new one"):
        pair.step(5, without=(2,))


@needs_device
def test_a_count_that_a_user_has_written_counts():
    pair = Pair(CAPTURABLE[1], {"lr": 0.01})
    pair.step(0)
    pair.step(1)
    pair.optimizer.state[pair.ours[2]]["step"].fill_(7.0)
    pair.reference.state[pair.theirs[2]]["step"].fill_(7.0)
    pair.step(2)
    pair.check()
    graph = pair.capture(3)
    pair.step(4, graph.replay)
    pair.check()


@needs_device
@pytest.mark.parametrize("spec", [spec for spec in CAPTURABLE if spec.cls.__module__ != "apex_npu.optimizers.nvidia"
                                  and spec.cls is not optimizers.FusedAdagrad], ids=str)  # fmt: skip
def test_a_grad_scaler_skips_steps_without_the_host(spec):
    """The first overflows, and the third, which the graph replays."""
    options = {**spec.variants[-1], **({"dampening": 0.3, "nesterov": False} if "SGD" in str(spec) else {})}
    pair = Pair(spec, options)
    scale = torch.tensor([4.0], device=DEVICE)
    found_inf = torch.zeros(1, device=DEVICE)
    pair.optimizer._step_supports_amp_scaling = True
    pair.optimizer.grad_scale, pair.optimizer.found_inf = scale, found_inf
    graph = Capture()
    for seed in range(6):
        overflows = seed in (0, 3)
        give(pair.ours, seed)
        give(pair.theirs, seed)
        found_inf.fill_(float(overflows))
        for p in pair.ours:
            p.grad.mul_(4.0)
            if overflows:
                p.grad.view(-1)[-1] = float("inf")
        if seed < 2:
            pair.optimizer.step()
        elif seed == 2:
            with graph:
                pair.optimizer.step()
        if seed >= 2:
            graph.replay()
        if not overflows:
            pair.reference.step()
    pair.check()


@needs_counts()
@pytest.mark.parametrize("spec", CAPTURABLE, ids=str)
def test_no_step_waits_for_the_device(spec):
    pair = Pair(spec, spec.variants[0])
    pair.step(0)
    give(pair.ours, 1)
    pair.optimizer._step_supports_amp_scaling = True
    pair.optimizer.grad_scale = torch.ones(1, device=DEVICE)
    pair.optimizer.found_inf = torch.zeros(1, device=DEVICE)
    with SIMULATOR.count() as n:
        pair.optimizer.step()
    assert n.syncs == n.d2h == n.h2d == 0


@needs_device
def test_what_a_replay_would_miss_is_refused_with_nothing_done():
    def refused(optimizer, because):
        before = [p.detach().clone() for p in ours]
        says = rf"NpuFusedAdam.step\(\) cannot be captured .*{because}.*Nothing"
        with pytest.raises(RuntimeError, match=says), Capture():
            optimizer.step()
        assert all(map(torch.equal, ours, before))

    ours = params(DEVICE)
    optimizer = optimizers.NpuFusedAdam(ours, capturable=True)
    give(ours, 0)
    refused(optimizer, "have changed since the previous step")
    optimizer.step()
    ours[1].grad = None
    refused(optimizer, "other parameters have gradients")
    optimizer.step()
    ours[0].data = ours[0].detach().clone()
    refused(optimizer, "have changed since the previous step")
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    refused(optimizer, "learning rate is a tensor on cpu, and parameters of group 0 are on ")
    optimizer.param_groups[0]["lr"] = 0.1
    with Capture():
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.param_groups[1]["params"][0].grad = torch.ones(2)
    optimizer.step()
    refused(optimizer, "group 1 has parameters on the CPU")


@needs_device
@pytest.mark.parametrize(
    "ask", ["step", "flat_grads", "get_optimizer_combined_params", "clip_optimizer_grad_norm_fused"]
)
def test_nothing_moves_into_buffers_in_a_capture(ask):
    """Storages would move at once, and what is in them with each replay."""
    ours = params(DEVICE)
    optimizer = optimizers.NpuFusedAdam(ours, capturable=True)
    give(ours, 0)
    with pytest.raises(RuntimeError, match="have changed since the previous step"), Capture():
        getattr(optimizer, ask)(*[1.0] * (ask[:4] == "clip"))
    assert all(torch.equal(p.cpu(), q) for p, q in zip(ours, params(), strict=True))


@needs_device
def test_a_captured_step_that_is_refused_leaves_gradients_where_they_were():
    ours = params(DEVICE)
    optimizer = optimizers.NpuFusedAdam(ours, capturable=True)
    give(ours, 0)
    optimizer.step()
    ours[1].grad, fresh = None, torch.ones_like(ours[0])
    ours[0].grad = fresh
    with pytest.raises(RuntimeError, match="other parameters have gradients"), Capture():
        optimizer.step()
    assert ours[0].grad is fresh


@needs_device
def test_a_group_without_parameters_has_no_device():
    ours = params(DEVICE)
    groups = [{"params": ours}, {"params": [], "lr": torch.tensor(0.1)}]
    optimizer = optimizers.NpuFusedAdam(groups, capturable=True)
    give(ours, 0)
    optimizer.step()
    with Capture():
        optimizer.step()


def add_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device=DEVICE))]})


def move(optimizer):
    (param,) = optimizer.param_groups[0]["params"]
    param.data = param.data.clone()


def load_into_new(optimizer):
    (param,) = optimizer.param_groups[0]["params"]
    fresh = dampened(nn.Parameter(param.detach().clone()))
    fresh.load_state_dict(optimizer.state_dict())
    return fresh


def dampened(param):
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    return optimizers.NpuFusedSGD([param], **options, fuse_grad_scaler=True, capturable=True)


def step_or_skip(optimizer, overflow):
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones_like(param)
    optimizer.grad_scale = torch.ones(1, device=DEVICE)
    optimizer.found_inf = torch.full((1,), float(overflow), device=DEVICE)
    optimizer.step()
    return param


@needs_device
@pytest.mark.parametrize("then", [add_group, move, load_into_new, copy.deepcopy])
def test_a_first_step_that_was_skipped_is_still_the_first(then):
    """With dampening the first step differs from later ones."""
    optimizer = dampened(nn.Parameter(torch.ones(3, device=DEVICE)))
    step_or_skip(optimizer, overflow=True)
    optimizer = then(optimizer) or optimizer
    param = step_or_skip(optimizer, overflow=False)
    torch.testing.assert_close(param.cpu(), torch.full((3,), 0.9))
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].cpu(), torch.ones(3))
    step_or_skip(then(optimizer) or optimizer, overflow=True)
    param = step_or_skip(optimizer, overflow=False)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].cpu(), torch.full((3,), 0.9 + 0.5))


@needs_device
def test_a_first_step_that_was_skipped_is_the_first_on_a_host_and_only_that():
    """A state dict continues the count of the device in the optimizer that loads it."""
    optimizer = dampened(nn.Parameter(torch.ones(3, device=DEVICE)))
    step_or_skip(optimizer, overflow=True)
    param = nn.Parameter(torch.ones(3))
    on_host = optimizers.NpuFusedSGD([param], lr=0.1, momentum=0.9, dampening=0.5)
    on_host.load_state_dict(optimizer.state_dict())
    reference = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([reference], lr=0.1, momentum=0.9, dampening=0.5)
    for step in range(4):
        param.grad, reference.grad = torch.full((3,), step + 1.0), torch.full((3,), step + 1.0)
        on_host.step()
        other.step()
        move(on_host)
        torch.testing.assert_close(param, reference)
        on_host.load_state_dict(on_host.state_dict())


@needs_device
def test_state_of_sgd_goes_to_torch_and_comes_from_there():
    ours, theirs = nn.Parameter(torch.ones(3, device=DEVICE)), nn.Parameter(torch.ones(3))
    optimizer, other = dampened(ours), torch.optim.SGD([theirs], lr=0.1, momentum=0.9, dampening=0.5)
    for _ in range(2):
        step_or_skip(optimizer, overflow=False)
    other.load_state_dict(optimizer.state_dict())
    theirs.data.copy_(ours.detach().cpu())
    for _ in range(2):
        step_or_skip(optimizer, overflow=False)
        theirs.grad = torch.ones(3)
        other.step()
        torch.testing.assert_close(ours.cpu(), theirs)
        optimizer.load_state_dict(other.state_dict())


@needs_device
def test_nvidias_adam_makes_its_learning_rate_a_tensor_and_takes_a_scalers_flag():
    ours = params(DEVICE)
    optimizer = optimizers.FusedAdam(ours, lr=0.01, capturable=True)
    (group,) = optimizer.param_groups
    assert group["lr"].device.type == DEVICE.type
    give(ours, 0)
    optimizer.step()
    with Capture() as graph:
        optimizer.step()
    group["lr"].zero_()
    before = [p.detach().clone() for p in ours]
    graph.replay()
    assert all(map(torch.equal, ours, before))
    optimizer.grad_scale, optimizer.found_inf = (torch.full((1,), 1.0, device=DEVICE) for _ in range(2))
    group["lr"].fill_(1.0)
    optimizer.step()
    assert all(map(torch.equal, ours, before))


@needs_device
def test_nvidias_adam_saves_the_count_of_a_group_as_theirs_does():
    ours = params(DEVICE)
    optimizer = optimizers.FusedAdam(ours, lr=0.01, capturable=True)
    for seed in range(2):
        give(ours, seed)
        optimizer.step()
    saved = optimizer.state_dict()
    step = saved["param_groups"][0]["step"]
    assert (step.dtype, step.device.type, step.item()) == (torch.int32, DEVICE.type, 2)
    optimizer.step()
    assert step.item() == 2
    optimizer.load_state_dict({**saved, "state": {i: {k: v for k, v in entry.items() if k != "step"}
                                                  for i, entry in saved["state"].items()}})  # fmt: skip
    optimizer.step()
    assert optimizer.state[ours[0]]["step"].item() == 3


@needs_device
def test_tables_of_another_delta_do_not_take_the_place_of_a_graphs():
    ours = params(DEVICE)
    optimizer = optimizers.NpuFusedAdamP(ours, lr=0.01, capturable=True)
    give(ours, 0)
    optimizer.step()
    graph = Capture()
    with graph:
        optimizer.step()
    (run,) = optimizer.fused_groups()[0].runs.current
    tables = [weakref.ref(t) for t in run._remembered["AdamP"][1] if isinstance(t, torch.Tensor)]
    assert tables
    del graph
    optimizer.param_groups[0]["delta"] = 0.5
    optimizer.step()
    assert all(table() is not None for table in tables)


def test_which_memory_is_no_graphs():
    """A segment of 100 bytes of a graph's, between two of the rest."""
    pools = [(300, (0, 0)), (100, (0, 0)), (200, (0, 7))]
    segments = [{"address": begin, "total_size": 100, "segment_pool_id": pool} for begin, pool in pools]
    addresses = (50, 100, 199, 200, 299, 300, 399, 400)
    found = outside_of_graphs(segments)
    assert [a for a in addresses if any(a in each for each in found)] == [100, 199, 300, 399]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_gradient_that_was_made_outside_of_the_capture_is_refused():
    ours = params(DEVICE)
    optimizer = optimizers.NpuFusedAdam(ours, capturable=True)
    give(ours, 0)
    optimizer.step()
    optimizer.zero_grad()
    give(ours, 1)
    says = r"shape \(5, 7\) was made after the previous step, and outside"
    with pytest.raises(RuntimeError, match=says), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("name", ["NpuFusedSGD", "NpuFusedAdam", "NpuFusedLamb", "FusedAdam", "FusedNovoGrad"])
def test_without_capturable_a_capture_is_refused_with_nothing_done(name):
    param = nn.Parameter(torch.ones(5, device=DEVICE))
    optimizer = getattr(optimizers, name)([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before, called = param.detach().clone(), []
    way_out = "Capture forward" if name == "FusedNovoGrad" else "Pass capturable=True; or capture forward"
    says = rf"^{name}.step\(\) cannot be captured .*{way_out}.*make_graphed_callables.*Nothing"
    with pytest.raises(RuntimeError, match=says), Capture():
        optimizer.step(lambda: called.append(1))
    assert not called, "the closure belongs to the step"
    assert torch.equal(param, before)
    optimizer.step()
    assert not torch.equal(param, before)


def test_without_cuda_captures_are_not_queried(monkeypatch):
    def fail():
        raise AssertionError("this could make a CUDA context in a process that needs none")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    param = nn.Parameter(torch.ones(5, device=DEVICE))
    param.grad = torch.ones_like(param)
    optimizers.NpuFusedSGD([param], lr=0.1).step()


@pytest.mark.parametrize("spec", CAPTURABLE, ids=str)
def test_on_a_cpu_capturable_changes_not_a_bit(spec):
    for options in spec.variants:
        one, other = params(), params()
        plain = spec.cls(one, **options)
        capturable = spec.cls(other, **options, capturable=True)
        for seed in range(3):
            for made, optimizer in ((one, plain), (other, capturable)):
                give(made, seed)
                optimizer.step()
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("restore", ["state dict", "copy"])
def test_state_moves_between_both_kinds_and_torch(restore):
    ours, theirs = params(DEVICE), params()
    optimizer = optimizers.NpuFusedAdamW(ours, lr=0.01, capturable=True)
    reference = torch.optim.AdamW(theirs, lr=0.01)
    for seed in range(2):
        give(ours, seed)
        give(theirs, seed)
        optimizer.step()
        reference.step()
    if restore == "copy":
        optimizer = copy.deepcopy(optimizer)
        assert optimizer.capturable
        ours = optimizer.param_groups[0]["params"]
    else:
        torchs = torch.optim.AdamW(theirs, lr=0.01)
        torchs.load_state_dict(optimizer.state_dict())
        reference = torchs
        plain = optimizers.NpuFusedAdamW(ours, lr=0.01)
        plain.load_state_dict(optimizer.state_dict())
        optimizer = optimizers.NpuFusedAdamW(ours, lr=0.01, capturable=True)
        optimizer.load_state_dict(plain.state_dict())
    for seed in range(2, 4):
        give(ours, seed)
        give(theirs, seed)
        optimizer.step()
        reference.step()
    assert_equal_params(ours, theirs, 1e-6)
    assert optimizer.state[ours[0]]["step"].item() == 4
    assert optimizer.state[ours[0]]["step"].device.type == DEVICE.type
