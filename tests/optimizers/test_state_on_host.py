# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``state_device="cpu"``: an accelerator's parameters are stepped on the host, as those of a CPU are, bit for bit."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from devices import DEVICE, SIMULATOR, VENDOR, needs_counts
from optimizer_specs import SPECS
from small_programs import backward, initialize, saved_and_loaded
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.fusion import host_grads

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU the argument has no effect"),
]

SHAPES = [(7, 5), (33,), (), (4, 3, 2, 2), (0, 3), (129,), (1,), (16, 16)]
# FusedMixedPrecisionLamb has no state_device.
RULES = [spec for spec in SPECS if not issubclass(spec.cls, optimizers.FusedMixedPrecisionLamb)]
LOW = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_grads, "CHUNK_NUMEL", 100)


def values(seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]
    # torch_npu takes no memory format but the contiguous one.
    return [t.to(memory_format=torch.channels_last) if t.dim() == 4 and not VENDOR else t for t in made]


def parameters(device, dtype=torch.float32):
    return [nn.Parameter(value.to(device)) for value in values(0, dtype)]


def give(params, step, *, scale=1.0, left_out=()):
    for i, (p, grad) in enumerate(zip(params, values(step + 1, scale=scale), strict=True)):
        p.grad = None if i in left_out else grad.to(p.device, p.dtype)


def assert_same(params, others):
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.detach().cpu(), q.detach())


def assert_same_state(optimizer, other):
    mine, its = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == its.keys()
    for number, entry in its.items():
        assert entry.keys() == mine[number].keys()
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert mine[number][name].device.type == "cpu" or name == "master_param"
                assert torch.equal(mine[number][name].cpu(), value), name
            else:
                assert mine[number][name] == value


class Pair:
    """Parameters on the device and their twins on the CPU, with optimizers of one kind."""

    def __init__(self, kind=optimizers.NpuFusedAdamW, dtype=torch.float32, **options):
        self.kind, self.options = kind, options
        self.params, self.twins = parameters(DEVICE, dtype), parameters("cpu", dtype)
        self.optimizer = kind(self.params, state_device="cpu", **options)
        self.twin = kind(self.twins, **options)

    def step(self, *steps, **how):
        for step in steps:
            for params, optimizer in ((self.params, self.optimizer), (self.twins, self.twin)):
                give(params, step, **how)
                optimizer.step()
                optimizer.zero_grad()

    def check(self):
        assert_same(self.params, self.twins)
        assert_same_state(self.optimizer, self.twin)


def variants():
    return [
        pytest.param(spec.cls, options, id=f"{spec}-{i}") for spec in RULES for i, options in enumerate(spec.variants)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), variants())
def test_a_step_is_that_of_the_cpu(kind, options, dtype):
    pair = Pair(kind, dtype, **options)
    pair.step(0, 1)
    pair.step(2, left_out=(1, 3, 7))
    pair.step(3, 4)
    pair.check()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "options",
    [
        {"store_param_remainders": True},
        {"state_dtype": "int8"},
        {"state_dtype": torch.bfloat16, "store_param_remainders": True},
        {"state_dtype": "int8", "store_param_remainders": "int8"},
        {"stochastic_rounding": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [optimizers.NpuFusedAdamW, optimizers.NpuFusedLamb])
def test_formats_are_those_of_the_cpu(kind, dtype, options):
    pair = Pair(kind, dtype, lr=1e-3, **options)
    pair.step(0, 1, 2, 3)
    pair.check()


@pytest.mark.parametrize("options", [{}, {"store_param_remainders": True}], ids=str)
def test_writes_to_parameters_count(options):
    dtype = torch.bfloat16 if options else torch.float32
    pair = Pair(dtype=dtype, lr=1e-3, **options)
    pair.step(0)
    for params in (pair.params, pair.twins):
        with torch.no_grad():
            params[0].mul_(0.5)
        params[3].data = params[3].data.clone() + 1
        params[7].data = torch.zeros(16, 16, dtype=dtype, device=params[7].device)
    pair.step(1, 2)
    assert_same(pair.params, pair.twins)


def test_writes_that_autograd_does_not_count_are_warned_of():
    pair = Pair(lr=1e-3)
    pair.step(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.step(1, 2, 3, 4, 5, 6)
    for params in (pair.params, pair.twins):
        params[1].data.fill_(0.25)
    with pytest.warns(RuntimeWarning, match="does not count"):
        pair.step(7)
    pair.check()


@pytest.mark.parametrize("options", [{}, {"state_dtype": "int8"}], ids=str)
def test_state_dicts_move_between_host_and_device(options):
    """From the host to the CPU, from there to a new optimizer on the host: as if nothing had moved."""
    pair = Pair(lr=1e-2, **options)
    pair.step(0, 1)
    pair.twin.load_state_dict(saved_and_loaded(pair.optimizer.state_dict()))
    pair.optimizer = optimizers.NpuFusedAdamW(pair.params, state_device="cpu", lr=1e-2, **options)
    pair.optimizer.load_state_dict(pair.twin.state_dict())
    pair.step(2, 3)
    pair.check()


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_copies_continue(copied):
    pair = Pair(lr=1e-2)
    pair.step(0, 1)
    pair.params, pair.optimizer = copied((pair.params, pair.optimizer))
    assert pair.optimizer.on_host
    pair.step(2)
    pair.check()


def test_parameters_may_come_late_thaw_and_move():
    pair = Pair(lr=1e-2)
    for params in (pair.params, pair.twins):
        params[0].requires_grad_(False)
    pair.step(0, left_out=(0,))
    for params, optimizer in ((pair.params, pair.optimizer), (pair.twins, pair.twin)):
        params[0].requires_grad_(True)
        params.append(nn.Parameter(torch.ones(9, device=params[0].device)))
        optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})
    for step in (1, 2):
        for params, optimizer in ((pair.params, pair.optimizer), (pair.twins, pair.twin)):
            give(params[:-1], step)
            params[-1].grad = torch.full_like(params[-1], 0.1)
            optimizer.step()
    pair.check()
    pair.optimizer.zero_grad()
    pair.twin.zero_grad()
    for p in pair.params:
        p.data = p.data.cpu()
    for params, optimizer in ((pair.params, pair.optimizer), (pair.twins, pair.twin)):
        give(params[:-1], 3)
        optimizer.step()
    pair.check()


@pytest.mark.parametrize("fold", [False, True], ids=["written", "folded"])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [optimizers.NpuFusedAdamW, optimizers.NpuFusedSGD, optimizers.NpuFusedLamb])
def test_amp_steps_the_values_of_the_cpu(kind, level, fold):
    """Given the same 16-bit gradients: with accumulation, an overflow that skips, a write and a checkpoint."""
    dtype = torch.float16 if level == "O2" else torch.bfloat16
    trained = []
    for device, options in ((DEVICE, {"state_device": "cpu"}), (torch.device("cpu"), {})):
        model = nn.ParameterList(parameters(device))
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        model, optimizer = initialize(model, optimizer, level, loss_scale="dynamic", fuse_unscale=fold)
        loss = torch.ones((), device=device, requires_grad=True)
        scales = []
        for step in range(6):
            for micro in range(2 if step == 3 else 1):
                with amp.scale_loss(loss, optimizer) as scaled:
                    factor = float("inf") if step == 2 else float(scaled)
                    for p, grad in zip(model, values(10 * step + micro, scale=1e-3), strict=True):
                        assert p.grad is None or fold
                        new = (grad * factor).to(device, dtype)
                        p.grad = new if p.grad is None else p.grad + new
            scales.append(float(scaled))
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                with torch.no_grad():
                    model[0].mul_(0.5)
        trained.append((model.state_dict(), optimizer.state_dict(), scales))
        amp.shutdown()
    (mine, of_mine, my_scales), (its, of_its, its_scales) = trained
    assert my_scales == its_scales
    for name, value in its.items():
        assert torch.equal(mine[name].cpu(), value), name
    for number, entry in of_its["state"].items():
        for name, value in entry.items():
            assert torch.equal(of_mine["state"][number][name].cpu(), value), (number, name)


@pytest.mark.parametrize("fold", [False, True], ids=["written", "folded"])
def test_amp_clips_and_resumes(fold):
    """Twelve steps, and six with a checkpoint between: the same bits."""

    def begin():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 3)).to(DEVICE)
        optimizer = optimizers.NpuFusedAdamW(model.parameters(), lr=1e-2, state_device="cpu")
        return amp.initialize(model, optimizer, opt_level="O5", fuse_unscale=fold, verbosity=0)

    def train(model, optimizer, steps):
        norms = []
        for step in steps:
            x = torch.randn(8, 9, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            loss = model(x).float().square().mean()
            backward(loss, optimizer)
            norms.append(float(optimizer.clip_optimizer_grad_norm_fused(0.01)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    whole = begin()
    norms = train(*whole, range(12))
    assert min(norms) > 0.01
    expected = {name: value.cpu() for name, value in whole[0].state_dict().items()}
    amp.shutdown()
    first = begin()
    assert train(*first, range(6)) == norms[:6]
    saved = saved_and_loaded([first[0].state_dict(), first[1].state_dict(), amp.state_dict()])
    amp.shutdown()
    model, optimizer = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert train(model, optimizer, range(6, 12)) == norms[6:]
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
    amp.shutdown()


def test_a_grad_scaler_unscales_and_skips():
    pair = Pair(lr=1e-2)
    for step, factor in ((0, 1.0), (1, float("inf")), (2, 1.0)):
        for params, optimizer, device in ((pair.params, pair.optimizer, DEVICE), (pair.twins, pair.twin, "cpu")):
            scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0)
            scaler.scale(torch.ones((), device=device))
            give(params, step, scale=1024.0 * factor)
            scaler.step(optimizer)
            scaler.update()
    pair.check()


@needs_counts("stand_in_counts")
@pytest.mark.parametrize(("fold", "most"), [(False, 6.1), (True, 4.1)], ids=["written", "folded"])
def test_the_device_holds_parameters_and_gradients(fold, most, monkeypatch):
    monkeypatch.setattr(host_grads, "CHUNK_NUMEL", 1 << 16)
    gc.collect()
    before = torch.npu.memory_allocated()  # of other tests
    sizes = [256] * 64
    model = nn.ParameterList(nn.Parameter(torch.ones(256, n, device=DEVICE)) for n in sizes)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), state_device="cpu")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", fuse_unscale=fold, verbosity=0)
    numel = sum(p.numel() for p in model)

    def block():
        loss = sum(p.float().sum() for p in model)
        backward(loss, optimizer)

    for _ in range(2):
        block()
        optimizer.step()
        optimizer.zero_grad()
    block()
    assert (torch.npu.memory_allocated() - before) / numel <= most
    with SIMULATOR.count() as counted:
        optimizer.step()
    chunks = -(-numel // (1 << 16))
    assert counted.h2d <= chunks + 1
    assert counted.d2h <= chunks + 2
    amp.shutdown()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"state_device": "meta"}, ValueError, "state_device must be 'cpu'"),
        ({"state_device": "cpu", "capturable": True}, ValueError, "leave capturable out"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        optimizers.NpuFusedAdamW(parameters(DEVICE), **options)


@pytest.mark.parametrize(
    "options", [{"combine_ddp": True, "combine_grad": True}, {"store_param_remainders": False}], ids=str
)
def test_amp_refuses_what_needs_the_device(options):
    model = nn.Linear(3, 3).to(DEVICE)
    optimizer = optimizers.NpuFusedAdamW(model.parameters(), state_device="cpu")
    with pytest.raises(RuntimeError, match=r"state_device='cpu'|torch\.distributed"):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **options)


def test_combined_buffers_are_refused():
    pair = Pair()
    pair.step(0)
    with pytest.raises(RuntimeError, match="state_device='cpu'"):
        pair.optimizer.get_optimizer_combined_params()


def test_a_wrong_gradient_is_refused_before_anything_changes():
    pair = Pair(lr=1e-2)
    pair.step(0)
    give(pair.params, 1)
    pair.params[1].grad = torch.ones(33).to_sparse().to(DEVICE)
    with pytest.raises(RuntimeError, match="sparse"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.check()
    pair.step(1)
    pair.check()


def test_a_wrong_gradient_of_another_dtype_leaves_all_as_it_was():
    """float32 parameters are brought before bfloat16 ones: none has to be stepped with gradients of the failed step."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5, device=DEVICE, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = optimizers.NpuFusedSGD(params, lr=0.5, state_device="cpu")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().cpu().clone() for p in params]
    params[1].grad = torch.ones(5, dtype=torch.bfloat16).to_sparse().to(DEVICE)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p.detach().cpu(), value)
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    for p, value in zip(params, before, strict=True):
        assert torch.equal(p.detach().cpu(), value - 1.0)


@needs_counts("stand_in_counts")
def test_after_a_failed_launch_all_is_as_before_or_the_error_says_that_it_is_not():
    said = set()
    for launches in range(40):
        pair = Pair(lr=1e-2)
        pair.step(0)
        give(pair.params, 1)
        SIMULATOR.fail_after(launches)
        try:
            pair.optimizer.step()
        except RuntimeError as error:
            may_repeat = "cannot be repeated" not in str(error)
            said.add(may_repeat)
            if may_repeat:
                assert_same(pair.params, pair.twins)
                pair.step(1)
                pair.check()
        else:
            SIMULATOR.fail_after(None)
            give(pair.twins, 1)
            pair.twin.step()
            pair.check()
            break
    assert said == {True, False}
