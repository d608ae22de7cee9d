# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What scripts do with combined buffers: clip ``[0]``, average ``[0]``, write to them, in every step and before any."""

import copy

import pytest
import torch
from captures import Capture
from devices import DEVICE
from small_programs import KINDS, LEVELS, WITH_MASTERS, backward, kinds, levels
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.fusion import flat_buffer
from apex_npu.optimizers import fused_params

EVERY_LEVEL = levels(LEVELS)
EVERY_KIND = kinds(("combine_grad", "fused", "fuse_unscale"))
EVERY_COUNT = pytest.mark.parametrize("groups", [1, 2, 3])
LR = 0.125
needs_device = pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU nothing is captured")


class Net(nn.Module):
    """Parameters of three layers, those of batch norm in float32 at O2; the last layer is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Linear(5, 5))
        self.layers[3].requires_grad_(False)

    def forward(self, x):
        return self.layers(x)

    def groups(self, count):
        """``count`` groups, and one whose parameters are all frozen."""
        params = [p for p in self.parameters() if p.requires_grad]
        return [{"params": params[i::count]} for i in range(count)] + [{"params": list(self.layers[3].parameters())}]


def start(level, kind="fused", groups=2, momentum=0.0, **more):
    torch.manual_seed(0)
    cls, options = KINDS[kind]
    model = Net().to(DEVICE)
    optimizer = cls(model.groups(groups), lr=LR, momentum=momentum)
    options = {"loss_scale": 64.0, "verbosity": 0, **options, **more}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def block(model, optimizer, number=0):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    backward(model(x).float().square().mean(), optimizer)


def step(model, optimizer, number=0):
    block(model, optimizer, number)
    optimizer.step()
    optimizer.zero_grad()


def allocations(monkeypatch, fails_at=None):
    """The arguments of each FlatBuffer that is made from now on; there is no memory for the ``fails_at``-th."""
    allocate, made = flat_buffer.FlatBuffer.__init__, []

    def counting(self, *args):
        made.append(args)
        if fails_at == len(made) - 1:
            raise flat_buffer.NoRoomError("no memory")
        allocate(self, *args)

    monkeypatch.setattr(flat_buffer.FlatBuffer, "__init__", counting)
    return made


def double(tensors):
    return [t.detach().double().cpu() for t in tensors]


def norm_of(tensors):
    return torch.cat([t.flatten() for t in double(tensors)]).norm().item()


def trained(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def kinds_of(optimizer):
    """What the optimizer trains, as its buffers have it: 16-bit parameters, and float32 ones."""
    params = trained(optimizer)
    low = [p for p in params if p.dtype != torch.float32]
    found = [low, [p for p in params if p.dtype == torch.float32]]
    return [params for params in found if params]


@EVERY_COUNT
@EVERY_LEVEL
def test_combined_gradients_of_torchs_optimizers_are_allocated_once(monkeypatch, level, groups):
    model, optimizer = start(level, "combine_grad", groups)
    made = allocations(monkeypatch)
    flats = optimizer.get_optimizer_combined_grads()
    assert [numel for numel, _, _ in made] == [flat.numel() for flat in flats]
    optimizer.get_optimizer_combined_grad_masks()
    assert [flat.data_ptr() for flat in optimizer.get_optimizer_combined_grads()] == [f.data_ptr() for f in flats]
    assert len(made) == len(flats)
    block(model, optimizer)
    for flat, params in zip(flats, kinds_of(optimizer), strict=True):
        assert flat.norm().item() == pytest.approx(norm_of(p.grad for p in params), rel=1e-5)


@EVERY_COUNT
@EVERY_LEVEL
def test_a_step_that_a_script_takes_by_itself(level, groups):
    """Parameters, gradients and masks are laid out alike."""
    model, optimizer = start(level, groups=groups)
    for number in range(3):
        block(model, optimizer, number)
        params = trained(optimizer)
        expected = [p - LR * g for p, g in zip(double(params), double(p.grad for p in params), strict=True)]
        masks = optimizer.get_optimizer_combined_grad_masks()
        grads, flats = optimizer.get_optimizer_combined_grads(), optimizer.get_optimizer_combined_params()
        for flat, grad, mask in zip(flats, grads, masks, strict=True):
            assert torch.equal(grad, grad * mask)
            flat.add_(grad, alpha=-LR)
        assert sum(int(mask.sum()) for mask in masks) == sum(p.numel() for p in params)
        for p, want in zip(params, expected, strict=True):
            # What a script writes to 16-bit parameters is rounded.
            rtol = 1e-6 if p.dtype == torch.float32 else torch.finfo(p.dtype).eps
            torch.testing.assert_close(p.detach().double().cpu(), want, rtol=rtol, atol=1e-7)
        optimizer.zero_grad()


def unfreeze(model, optimizer):
    model.layers[3].requires_grad_(True)


def add(model, optimizer):
    model.layers.append(nn.Linear(5, 3).to(DEVICE, model.layers[0].weight.dtype))
    optimizer.add_param_group({"params": list(model.layers[4].parameters())})


def re_point(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def replace(model, optimizer):
    old = model.layers[1].weight
    model.layers[1].weight = new = nn.Parameter(old.detach().clone())
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]


def remove(model, optimizer):
    optimizer.zero_grad()
    del optimizer.param_groups[0]


@pytest.mark.pairwise
@pytest.mark.parametrize("change", [unfreeze, add, re_point, replace, remove])
@EVERY_KIND
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_regrouped_is_combined_again(level, kind, change):
    model, optimizer = start(level, kind, momentum=0.5)
    for number in range(2):
        block(model, optimizer, number)
        optimizer.get_optimizer_combined_grads()
        optimizer.step()
        optimizer.zero_grad()
    change(model, optimizer)
    for number in range(2):
        block(model, optimizer, number)
        for flat, params in zip(optimizer.get_optimizer_combined_grads(), kinds_of(optimizer), strict=True):
            assert flat.norm().item() == pytest.approx(norm_of(p.grad for p in params), rel=1e-5)
            flat.zero_()
        assert norm_of(p.grad for p in trained(optimizer)) == 0.0
        if kind != "combine_grad":
            flats = optimizer.get_model_combined_params()
            norm = sum(norm_of([flat]) ** 2 for flat in flats) ** 0.5
            assert norm == pytest.approx(norm_of(trained(optimizer)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fused", "combine_grad"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_another_dtype_has_a_buffer_of_its_own(level, kind):
    cls, options = KINDS[kind]
    params = [nn.Parameter(torch.full((n,), float(n), device=DEVICE)) for n in (3, 5, 7)]
    low = [nn.Parameter(torch.full((n,), float(n), device=DEVICE, dtype=torch.bfloat16)) for n in (2, 4)]
    groups = [{"params": params[:2]}, {"params": low[:1]}, {"params": [*params[2:], *low[1:]]}]
    optimizer = amp.initialize([], cls(groups, lr=1.0), opt_level=level, loss_scale=2.0, verbosity=0, **options)[1]
    backward(sum((p.float() * p.numel()).sum() for p in (*params, *low)), optimizer)
    flats = optimizer.get_optimizer_combined_grads()
    assert [(flat.dtype, flat.sum().item()) for flat in flats] == [
        (torch.float32, 9.0 + 25.0 + 49.0),
        (torch.bfloat16, 4.0 + 16.0),
    ]
    for flat in flats:
        flat.mul_(0.5)
    optimizer.step()
    for p in (*params, *low):
        assert p.tolist() == [p.numel() / 2] * p.numel()


def weights(count, momentum=0.9, cls=optimizers.NpuFusedSGD, groups=1, **options):
    params = [nn.Parameter(torch.full((3,), float(i + 1), device=DEVICE)) for i in range(count)]
    each = [{"params": params[i::groups]} for i in range(groups)]
    if momentum is not None:
        options["momentum"] = momentum
    return params, cls(each, lr=1.0, **options)


def give(params, *values):
    for p, value in zip(params, values, strict=True):
        p.grad = None if value is None else torch.full_like(p, value)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_gradient_that_is_none_counts_as_zeros(groups):
    params, optimizer = weights(2, groups=groups)
    give(params, 3.0, 4.0)
    assert optimizer.get_optimizer_combined_grads()[0].sum().item() == 21.0
    kept = params[0].grad
    optimizer.zero_grad()
    give(params, None, 5.0)
    assert optimizer.get_optimizer_combined_grads()[0].sum().item() == 15.0
    assert kept.tolist() == [3.0] * 3


@EVERY_KIND
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_buffer_that_was_scaled_by_nan_serves_the_next_step(level, kind):
    """As by a script that clips to a norm which has overflowed: padding is in the buffer, too."""
    model, optimizer = start(level, kind, loss_scale="dynamic", dynamic_init_scale=64.0)
    block(model, optimizer)
    for flat in optimizer.get_optimizer_combined_grads():
        flat.mul_(float("nan"))
    optimizer.zero_grad()
    for number in range(2):
        step(model, optimizer, number)
        assert amp.last_step(optimizer).applied
    block(model, optimizer, 3)
    assert all(flat.isfinite().all() for flat in optimizer.get_optimizer_combined_grads())


@EVERY_KIND
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_buffers_that_a_script_keeps_have_the_gradients_of_every_block(level, kind):
    model, optimizer = start(level, kind, loss_scale=64.0)
    step(model, optimizer)
    block(model, optimizer)
    flats = optimizer.get_optimizer_combined_grads()
    optimizer.step()
    optimizer.zero_grad()
    block(model, optimizer, 1)
    if kind != "fuse_unscale":  # gradients are scaled until the step, which reads them
        for flat in flats:
            flat.zero_()
        assert norm_of(p.grad for p in trained(optimizer)) == 0.0


@levels(WITH_MASTERS)
def test_what_is_written_before_the_first_block_stays(level):
    model, optimizer = start(level)
    flats = optimizer.get_optimizer_combined_params()
    with torch.no_grad():
        for flat in flats:
            flat.fill_(0.25)
        model.layers[0].bias.fill_(2.0)
    block(model, optimizer)
    for p in trained(optimizer):
        assert set(p.flatten().tolist()) == {2.0 if p is model.layers[0].bias else 0.25}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_are_combined_by_themselves(level):
    model, optimizer = start(level)
    step(model, optimizer)
    flats = optimizer.get_optimizer_combined_params()
    _, twin_optimizer = copy.deepcopy((model, optimizer))
    for flat, other in zip(flats, twin_optimizer.get_optimizer_combined_params(), strict=True):
        assert norm_of([flat]) == pytest.approx(norm_of([other]), rel=1e-6)
        other.zero_()
    assert norm_of(trained(optimizer)) > 0.0 == norm_of(trained(twin_optimizer))


def test_inside_of_a_block_nothing_moves():
    model, optimizer = start("O2", "fused", store_param_remainders=False)

    def ask():
        with amp.scale_loss(model(torch.randn(4, 4, device=DEVICE)).float().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.get_optimizer_combined_grads()

    with pytest.raises(RuntimeError, match=r"inside of amp\.scale_loss.*call the accessor after the block"):
        ask()
    optimizer.zero_grad()
    optimizer.get_optimizer_combined_grads()
    ask()


@EVERY_KIND
@EVERY_LEVEL
def test_inside_of_a_block_gradients_are_multiplied_by_the_loss_scale(level, kind):
    norms = []
    for asks in (True, False):
        model, optimizer = start(level, kind)
        x = torch.ones(2, 4, device=DEVICE)
        optimizer.get_optimizer_combined_grads()
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
            if asks:
                shown = norm_of(optimizer.get_optimizer_combined_grads())
                assert shown == pytest.approx(norm_of(p.grad for p in trained(optimizer)), rel=1e-6)
            scaled_loss.backward()
        norms.append(norm_of(optimizer.get_optimizer_combined_grads()))
        assert not asks or shown == pytest.approx(norms[0] * 64.0 / 2, rel=1e-2)
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@EVERY_LEVEL
@EVERY_KIND
def test_gradients_that_are_still_to_be_unscaled_are_not_shown(level, kind):
    """Neither multiplied by the loss scale nor as zeros."""
    model, optimizer = start(level, kind)
    twin, _ = start(level, kind)
    x = torch.ones(2, 4, device=DEVICE)
    optimizer.get_optimizer_combined_grads()
    backward(model(x).float().sum(), optimizer, delay_unscale=True)
    for read in (optimizer.get_optimizer_combined_grads, optimizer.get_optimizer_combined_grad_masks):
        with pytest.raises(RuntimeError, match=r"delay_unscale=True.*before reading combined gradients, close a block"):
            read()
    backward(model(x).float().sum(), optimizer)
    shown = norm_of(optimizer.get_optimizer_combined_grads())
    (2.0 * twin(x).float().sum()).backward()
    assert shown == pytest.approx(norm_of([p.grad for p in twin.parameters() if p.grad is not None]), rel=2e-2)


def test_a_parameter_in_memory_of_others_is_named():
    params, optimizer = weights(2, groups=2)
    whole = torch.ones(100, device=DEVICE)
    params[1].data = whole[7:10]
    give(params, 1.0, 2.0)
    for call in (optimizer.get_optimizer_combined_params, optimizer.get_optimizer_combined_grads):
        with pytest.raises(RuntimeError, match=r"of shape \(3,\) cannot be moved.*p\.data = p\.data\.clone\(\)"):
            call()
    optimizer.step()
    params[1].data = params[1].data.clone()
    assert optimizer.get_optimizer_combined_params()[0].sum().item() == 3 * 0.0 + 3 * -1.0


def test_neighbours_in_memory_of_others_are_no_combined_buffer():
    params, optimizer = weights(2, groups=2)
    whole = torch.ones(100, device=DEVICE)
    for i, p in enumerate(params):
        p.data = whole[3 * i : 3 * i + 3]
    give(params, 1.0, 2.0)
    with pytest.raises(RuntimeError, match="cannot be moved into a combined buffer"):
        optimizer.get_optimizer_combined_grads()
    optimizer.step()
    assert whole[:7].tolist() == [0.0] * 3 + [-1.0] * 3 + [1.0]


def test_after_a_refusal_all_is_as_before():
    params, optimizer = weights(3, groups=3)
    plain, reference = weights(3, groups=3, cls=torch.optim.SGD)
    whole = torch.full((5,), 2.0, device=DEVICE)
    # Both are stepped in place; without the extension, the latter as well.
    params[1].data = whole[1:4]
    alias = params[2].detach()

    def both(*values):
        for made, one in ((params, optimizer), (plain, reference)):
            give(made, *values)
            one.step()

    for made in (params, plain):
        made[0].requires_grad_(False)
    both(None, 2.0, 3.0)
    for made in (params, plain):
        made[0].requires_grad_(True)  # it gets a buffer of its own
    both(1.0, 2.0, 3.0)
    del alias
    momenta = [optimizer.state[p]["momentum_buffer"] for p in params]
    places = [m.data_ptr() for m in momenta] + [p.data_ptr() for p in params]
    with pytest.raises(RuntimeError, match="cannot be moved"):
        optimizer.get_optimizer_combined_grads()
    both(3.0, 2.0, 1.0)
    for p, momentum in zip(params, momenta, strict=True):
        assert optimizer.state[p]["momentum_buffer"] is momentum
    assert [m.data_ptr() for m in momenta] + [p.data_ptr() for p in params] == places
    for p, q in zip(params, plain, strict=True):
        assert p.tolist() == q.tolist()
        assert optimizer.state[p]["momentum_buffer"].tolist() == reference.state[q]["momentum_buffer"].tolist()


@needs_device
def test_in_a_capture_nothing_moves():
    params, optimizer = weights(2, groups=2, cls=optimizers.NpuFusedAdam, momentum=None, capturable=True)
    give(params, 1.0, 2.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Call the accessor once before the capture"), Capture():
        optimizer.get_optimizer_combined_grads()
    (grads,) = optimizer.get_optimizer_combined_grads()
    optimizer.step()
    with Capture() as graph:
        optimizer.get_optimizer_combined_grads()[0].mul_(0.5)
        optimizer.step()
    assert graph is not None
    assert grads.sum().item() in (9.0, 4.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device=DEVICE))]})
    with pytest.raises(RuntimeError, match="has a step in a captured CUDA graph"):
        optimizer.get_optimizer_combined_params()


@needs_device
def test_when_a_captured_graph_is_not_replayed_any_more_buffers_can_be_combined():
    params, optimizer = weights(2, groups=2, cls=optimizers.NpuFusedAdam, momentum=None, capturable=True)
    plain, reference = weights(2, groups=2, cls=torch.optim.Adam, momentum=None)
    for made, one in ((params, optimizer), (plain, reference)):
        made[1].requires_grad_(False)
        give(made, 1.0, None)
        one.step()
        made[1].requires_grad_(True)  # it gets a buffer of its own
        for _ in range(2):
            give(made, 1.0, 2.0)
            one.step()
    graph = Capture()
    with graph:
        optimizer.step()
    for _ in range(3):
        graph.replay()
        reference.step()
    del graph
    with pytest.raises(RuntimeError, match=r"after the last replay.*\(p\.data = p\.data\.clone\(\)\)"):
        optimizer.get_optimizer_combined_params()
    for p in params:
        p.data = p.data.clone()
    give(params, 1.0, 2.0)
    (flat,) = optimizer.get_optimizer_combined_params()
    assert flat.sum().item() == pytest.approx(sum(p.sum().item() for p in plain), abs=1e-5)
    optimizer.step()
    reference.step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        assert float(optimizer.state[p]["step"]) == float(reference.state[q]["step"])


def test_torchs_optimizers_have_no_buffers_of_parameters():
    optimizer = start("O1", "combine_grad")[1]
    with pytest.raises(RuntimeError, match="SGD does not keep its parameters in combined buffers"):
        optimizer.get_model_combined_params()


@pytest.mark.parametrize("fails_at", range(6))
def test_where_memory_runs_out_nothing_is_lost(monkeypatch, fails_at):
    params, optimizer = weights(2, groups=2)
    plain, reference = weights(2, groups=2, cls=torch.optim.SGD)

    def both():
        for made, one in ((params, optimizer), (plain, reference)):
            give(made, 1.0, 2.0)
            one.step()

    both()
    with monkeypatch.context() as patch:
        made = allocations(patch, fails_at)
        try:
            optimizer.get_optimizer_combined_grads()
        except flat_buffer.NoRoomError:
            assert len(made) == fails_at + 1
        else:
            assert len(made) <= fails_at
    both()
    optimizer.get_optimizer_combined_grads()
    both()
    for p, q in zip(params, plain, strict=True):
        assert p.tolist() == q.tolist()


class Swapped:
    """Training in which one parameter is another one in each step, as by partial FC; counts allocations."""

    def __init__(self, monkeypatch, level, kind, together):
        cls, options = KINDS[kind]
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(DEVICE)
        self.centers = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        self.momenta = torch.zeros_like(self.centers)
        self.sampled = nn.Parameter(self.centers[0].clone())
        trunk = list(self.model.parameters())
        last = [self.sampled]
        groups = [{"params": trunk + last}] if together else [{"params": trunk}, {"params": last}]
        optimizer = cls(groups, lr=0.02, momentum=0.5)
        self.other = cls([nn.Parameter(torch.ones(3, device=DEVICE))], lr=0.1)
        self.model, (self.optimizer, self.other) = amp.initialize(
            self.model, [optimizer, self.other], opt_level=level, loss_scale=64.0, verbosity=0, **options
        )
        self.made = allocations(monkeypatch)

    def step(self, number):
        """Swap, and take a step; what it allocated."""
        before = len(self.made)
        optimizer, former = self.optimizer, self.sampled
        self.sampled = nn.Parameter(self.centers[number % 6].clone())
        optimizer.state.pop(former, None)
        optimizer.param_groups[-1]["params"][-1] = self.sampled
        optimizer.state[self.sampled]["momentum_buffer"] = self.momenta[number % 6].clone()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        loss = (self.model(x).float() @ self.sampled.t()).square().mean()
        other = self.other.param_groups[0]["params"][0]
        backward(loss + other.square().sum(), [optimizer, self.other])
        optimizer.step()
        self.other.step()
        with torch.no_grad():
            self.centers[number % 6] = self.sampled
            self.momenta[number % 6] = optimizer.state[self.sampled]["momentum_buffer"]
        optimizer.zero_grad()
        self.other.zero_grad()
        return [numel for numel, _, _ in self.made[before:]]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["fused", "combine_grad"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_parameter_that_is_replaced_in_every_step_costs_the_others_nothing(monkeypatch, level, kind, together):
    training = Swapped(monkeypatch, level, kind, together)
    # The first swaps may take what is swapped out of the buffers of the rest.
    allocated = [training.step(number) for number in range(12)]
    assert all(numels == allocated[2] for numels in allocated[2:])
    # 40 elements and their padding; nothing, where their gradients stay where they are.
    assert max(allocated[2], default=0) <= 80
    amp.shutdown()
    reference = Swapped(monkeypatch, level, "torch", together)
    for number in range(12):
        reference.step(number)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if level == "O1" else {"rtol": 2e-3, "atol": 2e-3}
    assert reference.centers.isfinite().all()
    for ours, theirs in ((training.centers, reference.centers), (training.momenta, reference.momenta)):
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_what_a_failed_fusing_has_moved_is_fused_again(monkeypatch):
    params, optimizer = weights(3)
    give(params, 1.0, 1.0, 1.0)
    optimizer.step()
    swapped = nn.Parameter(torch.ones(4, 2, device=DEVICE))
    optimizer.param_groups[0]["params"][2] = swapped
    swapped.grad = torch.ones(4, 2, device=DEVICE)

    def no_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fused_params, "fuse", no_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert all(group.has_buffer for group in optimizer.fused_groups())


def test_an_interrupt_while_buffers_are_combined_keeps_the_state(monkeypatch):
    params, optimizer = weights(2, None, optimizers.NpuFusedAdam, groups=2)
    params[1].requires_grad_(False)
    give(params, 1.0, None)
    optimizer.step()
    params[1].requires_grad_(True)  # from now on it has a buffer of its own
    give(params, 1.0, 1.0)
    optimizer.step()

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer), "_end_fusing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.get_optimizer_combined_params()
    give(params, 1.0, 1.0)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0, 2.0]


def test_zeros_are_written_to_all_gradients_after_a_failed_fusing():
    params, optimizer = weights(2, groups=2)
    give(params, 1.0, 1.0)
    optimizer.step()
    extra = nn.Parameter(torch.ones(3, device=DEVICE))
    extra.grad = torch.ones(3, device=DEVICE)
    optimizer.param_groups[0]["params"].append(extra)
    params[1].data = torch.ones(1, device=DEVICE).expand(params[1].shape)
    params[1].grad = None
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(ValueError, match="does not fill its memory"):
        optimizer.step()
    params[1].data = params[1].data.contiguous()
    optimizer.zero_grad(set_to_none=False)
    assert not extra.grad.any()
