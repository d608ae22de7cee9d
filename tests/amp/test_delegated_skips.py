# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""With a capturable optimizer the device skips steps by itself: same results as a skip by the host, without a wait."""

import random
import threading
import warnings
import weakref

import pytest
import torch
from devices import DEVICE, SAME_KERNELS, SIMULATOR, are_dropped, needs, needs_counts
from small_programs import initialize
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.amp import pending_step
from apex_npu.fusion import EncodedView
from apex_npu.ops import masks_writes

needs_device = pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU there is nothing to wait for")
CAPTURABLE = [
    optimizers.NpuFusedSGD, optimizers.NpuFusedAdam, optimizers.NpuFusedAdamW, optimizers.NpuFusedAdamP,
    optimizers.NpuFusedAdadelta, optimizers.NpuFusedLamb, optimizers.NpuFusedRMSprop, optimizers.NpuFusedRMSpropTF,
    optimizers.FusedAdam, optimizers.FusedSGD, optimizers.FusedLAMB, optimizers.FusedAdagrad,
    optimizers.NpuFusedMuon,
]  # fmt: skip


@pytest.fixture(autouse=True)
def delegated(monkeypatch):
    """On a simulated device, too, where it would cost more than a wait."""
    monkeypatch.setattr(pending_step, "masks_writes", lambda device: True)


def make(level="O0", cls=optimizers.NpuFusedAdam, capturable=True, formats=None, **options):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    model.to(DEVICE)
    more = {"momentum": 0.9} if cls in (optimizers.NpuFusedSGD, optimizers.FusedSGD) else {}
    if cls is optimizers.NpuFusedMuon:
        more = {"use_muon": "auto"}
    optimizer = cls(model.parameters(), lr=0.05, capturable=capturable, **more, **formats or {})
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**10, "scale_window": 3, "verbosity": 0, **options}
    return amp.initialize(model, optimizer, opt_level=level, **options)


def backward(model, optimizer, seed=0, bad=False, **options):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    loss = model(x).float().square().mean()
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        if bad:
            spoil(model)


def spoil(model, value=float("inf")):
    list(model.parameters())[1].grad[2] = value


def everything(model, optimizer):
    """What there is to be seen: parameters, their float32 values, state, scale, the last step."""
    entries = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    tensors = list(model.parameters())
    with amp.float32_params(optimizer):
        tensors += [p.detach().clone() for p in tensors]
    # A host that has skipped all steps so far shows no state; the device has made it, and left it at its first value.
    shown = [(name, value) for entry in entries for name, value in sorted(entry.items())]
    # A device counts SGD's steps, too.
    shown = [(name, value.dequantize() if isinstance(value, EncodedView) else value) for name, value in shown]
    values = [value for name, value in shown if isinstance(value, torch.Tensor) and name != "applied_steps"]
    tensors += [value for value in values if value.any()]
    return [t.detach().cpu() for t in tensors], amp.state_dict(), amp.last_step(optimizer)


# Of numbers near 1, where a step is rounded otherwise: about as many as there are steps.
ROUNDINGS = 12


def assert_same(got, want):
    assert got[1:] == want[1:]
    assert len(got[0]) == len(want[0])
    for a, b in zip(got[0], want[0], strict=True):
        assert a.dtype == b.dtype
        rounding = 0.0 if SAME_KERNELS or not a.is_floating_point() else ROUNDINGS * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, equal_nan=True)


def train(level, cls, capturable, **options):
    clip = options.pop("clip", None)
    model, optimizer = make(level, cls, capturable, **options)
    for step in range(12):
        optimizer.zero_grad()
        backward(model, optimizer, step, bad=step in (0, 4, 5, 11))
        if clip is not None:
            optimizer.clip_optimizer_grad_norm_fused(0.3, clip)
        optimizer.step()
    found = everything(model, optimizer)
    amp.shutdown()
    return found


@needs_device
@pytest.mark.parametrize("clip", [None, 2.0, float("inf"), 0.0])
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_training_is_that_of_an_optimizer_for_which_the_host_decides(level, fuse_unscale, clip):
    # SGD, whose arithmetic is the same where numbers are on the device.
    options = {"fuse_unscale": fuse_unscale, "clip": clip}
    got, want = (train(level, optimizers.NpuFusedSGD, capturable, **options) for capturable in (True, False))
    assert got[1]["loss_scaler0"] == {"loss_scale": 2.0**10 * 2 / 16 * 2, "unskipped": 0}
    assert got[2].skipped
    assert got[2].skipped_steps == 4
    assert_same(got, want)


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("cls", CAPTURABLE, ids=lambda cls: cls.__name__)
def test_every_rule_leaves_a_skipped_step_to_the_device(cls, fuse_unscale):
    got, want = (train("O2", cls, capturable, fuse_unscale=fuse_unscale) for capturable in (True, False))
    assert got[1:] == want[1:]
    for a, b in zip(got[0], want[0], strict=True):
        # Learning rate and corrections are rounded differently where the device computes them.
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


ACTIONS = [*["good"] * 3, *["step"] * 3, *["zero"] * 2, "bad", "delayed", "clip", "clip inf", "clip with torch",
           "zero in place", "state_dict", "last_step", "load", "other loss", "failing block", "unchecked"]  # fmt: skip


def run_program(seed, capturable):
    """A random sequence of what scripts do between blocks: all that could be seen on the way, and at the end."""
    choose = random.Random(seed)
    level = choose.choice(["O0", "O1", "O2"])
    held = choose.random() < 0.5
    model, optimizer = make(level, optimizers.NpuFusedSGD, capturable, fuse_unscale=held, num_losses=2)
    seen = []
    delivered = False  # a backward has been, so that a step has something to do
    for i in range(30):
        action = choose.choice(ACTIONS)
        if action in ("good", "bad", "other loss", "unchecked"):
            options = {"loss_id": 1} if action == "other loss" else {}
            if action == "unchecked":
                options["delay_overflow_check"] = True
            backward(model, optimizer, i, bad=action == "bad", **options)
            delivered = True
        elif action == "delayed":
            backward(model, optimizer, i, delay_unscale=True)
            backward(model, optimizer, i + 50, bad=choose.random() < 0.3)
            delivered = True
        elif action == "failing block":
            with pytest.raises(KeyError), amp.scale_loss(torch.ones((), device=DEVICE, requires_grad=True), optimizer):
                raise KeyError
        elif action.startswith("zero"):
            optimizer.zero_grad(set_to_none=action == "zero")
            delivered = False
        elif action == "step" and delivered:
            optimizer.step()
            delivered = False
            optimizer.zero_grad(set_to_none=choose.random() < 0.7)
        elif action == "state_dict":
            seen.append(amp.state_dict())
        elif action == "last_step":
            seen.append(amp.last_step(optimizer))
        elif action == "load":
            amp.load_state_dict(amp.state_dict())
        elif action == "clip with torch" and not held:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        elif action.startswith("clip") and delivered:
            optimizer.clip_optimizer_grad_norm_fused(0.5, float("inf") if action == "clip inf" else 2.0)
    found = everything(model, optimizer)
    amp.shutdown()
    return seen, found


@needs_device
@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(s, marks=pytest.mark.sweep) for s in range(60, 600))])
def test_random_programs_do_what_they_do_where_the_host_decides(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflows drive the scale down
        (got_seen, got), (want_seen, want) = (run_program(seed, capturable) for capturable in (True, False))
    assert got_seen == want_seen
    assert_same(got, want)


def counted(call):
    with SIMULATOR.count() as n:
        call()
    return n


@needs("flag_on_the_device")
@needs_counts()
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_nothing_waits_but_the_next_block_for_a_number_that_is_on_its_way(level, fuse_unscale, clip):
    model, optimizer = make(level, fuse_unscale=fuse_unscale)
    x = torch.ones(4, 5, device=DEVICE)
    for step in range(4):
        loss = model(x).float().square().mean()
        block = amp.scale_loss(loss, optimizer)
        scaled_loss = None

        def enter():
            nonlocal scaled_loss
            scaled_loss = block.__enter__()  # noqa: B023

        entered = counted(enter)
        if step:  # one event, of the copy before: work queued after it is not waited for
            assert (entered.syncs, entered.d2h) == (1, 0)
        else:
            assert (entered.syncs, entered.d2h) == (0, 0)
        scaled_loss.backward()
        if step == 1:
            spoil(model)
        parts = {
            "exit": counted(lambda: block.__exit__(None, None, None)),  # noqa: B023
            "clip": counted(lambda: clip and optimizer.clip_optimizer_grad_norm_fused(0.1)),
            "step": counted(optimizer.step),
            "zero": counted(optimizer.zero_grad),
        }
        if step:  # in the first the host reads the counts that there are
            assert {part: n.syncs for part, n in parts.items() if n.syncs} == {}
            # In step 2 the look for uncounted writes copies its result as well.
            assert sum(n.d2h for n in parts.values()) == 1 + (level == "O2" and step == 1)
    assert amp.last_step(optimizer).skipped_steps == 1


@needs("flag_on_the_device")
@needs_device
def test_it_is_said_when_it_is_known(capsys):
    model, optimizer = make(verbosity=1)
    capsys.readouterr()
    backward(model, optimizer, bad=True)
    optimizer.step()
    assert capsys.readouterr().out == ""
    assert amp.last_step(optimizer).skipped
    assert capsys.readouterr().out == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n"
    optimizer.zero_grad()
    backward(model, optimizer, bad=True)
    optimizer.step()
    backward(model, optimizer)  # needs the scale
    assert "reducing loss scale to 256.0" in capsys.readouterr().out


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_are_not_called_for_a_skipped_step(register, fuse_unscale):
    model, optimizer = make(fuse_unscale=fuse_unscale)
    calls = []
    getattr(optimizer, register)(lambda *_: calls.append(1))
    for step, bad in enumerate((False, True, False)):
        optimizer.zero_grad()
        backward(model, optimizer, step, bad=bad)
        optimizer.step()
    assert calls == [1, 1]


@needs_device
def test_a_hook_that_comes_between_block_and_step_is_not_called_for_a_skipped_step():
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == []
    assert amp.last_step(optimizer).skipped


@needs("inf")
@needs_device
def test_the_alarm_finds_the_gradients_that_it_is_about(caplog):
    model, optimizer = make(skip_alarm=3)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, optimizer, step, bad=True)
        optimizer.step()
        optimizer.zero_grad()
    (message,) = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert "3 steps in a row" in message
    assert "the gradients of 0.bias are not finite" in message


@needs("inf")
@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_a_norm_that_overflows_is_no_overflow_of_a_gradient(fuse_unscale):
    model, optimizer = make(fuse_unscale=fuse_unscale, dynamic_init_scale=1.0)
    backward(model, optimizer)
    for p in model.parameters():
        p.grad.fill_(3e38)
    assert optimizer.clip_optimizer_grad_norm_fused(1.0).isinf()
    optimizer.step()
    assert amp.last_step(optimizer).applied


@needs("flag_on_the_device")
@needs_device
def test_a_step_that_fails_leaves_the_question_open():
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    (group,) = optimizer.param_groups
    lr, group["lr"] = group["lr"], "much"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")
    group["lr"] = lr
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert amp.last_step(optimizer).skipped


@needs_device
def test_parameters_of_two_devices_leave_nothing_to_a_device():
    other = torch.device("npu", 1) if DEVICE.type == "npu" else torch.device("cpu")
    first, second = (nn.Linear(2, 2).to(device) for device in (DEVICE, other))
    made = optimizers.NpuFusedAdam([*first.parameters(), *second.parameters()], lr=0.1, capturable=True)
    (first, second), optimizer = initialize([first, second], made, "O0", loss_scale="dynamic")
    before = [p.detach().clone() for p in [*first.parameters(), *second.parameters()]]
    loss = second(first(torch.ones(1, 2, device=DEVICE)).to(other)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
        second.bias.grad[0] = float("nan")
    optimizer.step()
    assert all(map(torch.equal, before, [*first.parameters(), *second.parameters()]))
    assert amp.last_step(optimizer).skipped


@needs_device
def test_a_new_initialize_does_not_lose_what_is_on_its_way():
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    optimizer.step()
    other = nn.Linear(5, 3).to(DEVICE)
    amp.initialize(other, optimizers.NpuFusedSGD(other.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert amp.last_step(optimizer).applied
    assert amp.last_step(optimizer).skipped_steps == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU with Triton does not")
def test_a_device_that_would_have_to_copy_what_is_written_waits_instead(monkeypatch):
    monkeypatch.undo()
    assert not masks_writes(DEVICE)
    model, optimizer = make()
    backward(model, optimizer, bad=True)
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert len(optimizer.state) == 0  # the optimizer's own step has not been called


def skips_all(optimizer, model):
    """Whether a step with gradients of which one is inf leaves all parameters as they are."""
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer, bad=True)
    optimizer.step()
    return all(map(torch.equal, before, model.parameters()))


class Halving:
    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            torch._foreach_mul_([p for group in self.param_groups for p in group["params"]], 0.5)
        return loss


class HalvingStep(Halving, optimizers.NpuFusedSGD):
    pass


class HalvingRule(optimizers.NpuFusedSGD):
    def update(self, run, group):
        super().update(run, group)
        run.param.mul_(0.5)


class HalvingBefore(optimizers.NpuFusedSGD):
    def before_updates(self, runs):
        for run, _ in runs:
            run.param.mul_(0.5)


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("cls", [HalvingStep, HalvingRule, HalvingBefore])
def test_what_a_subclass_does_in_a_step_is_skipped_with_it(cls, fuse_unscale):
    model, optimizer = make(cls=cls, fuse_unscale=fuse_unscale)
    assert skips_all(optimizer, model)
    assert amp.last_step(optimizer).skipped


@needs_device
def test_a_subclass_that_changes_no_step_is_left_to_the_device():
    class Named(optimizers.NpuFusedSGD):
        def validate(self, group):
            super().validate(group)

    assert pending_step.supports_found_inf(make(cls=Named)[1])


class AsksMeanwhile(optimizers.NpuFusedSGD):
    supports_capture = True  # heeds run.found_inf, as its base does

    def update(self, run, group):
        super().update(run, group)
        in_another_thread(amp.state_dict)


def in_another_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_a_read_in_the_middle_of_a_step_changes_nothing(fuse_unscale):
    model, optimizer = make(cls=AsksMeanwhile, fuse_unscale=fuse_unscale)
    assert skips_all(optimizer, model)
    assert amp.last_step(optimizer).skipped_steps == 1
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # which no block has reported
    assert not any(map(torch.equal, before, model.parameters()))
    assert amp.last_step(optimizer).applied


@needs_device
def test_a_read_just_before_the_flag_is_set_changes_nothing(monkeypatch):
    real = pending_step.PendingStep.take

    def take(*args):
        in_another_thread(amp.state_dict)
        real(*args)

    monkeypatch.setattr(pending_step.PendingStep, "take", take)
    model, optimizer = make(fuse_unscale=True)
    assert skips_all(optimizer, model)
    assert amp.last_step(optimizer).skipped_steps == 1


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_is_on_its_way_keeps_neither_model_nor_optimizer(level, fuse_unscale):
    model, optimizer = make(level, fuse_unscale=fuse_unscale)
    backward(model, optimizer, bad=True)
    optimizer.step()
    watched = [weakref.ref(thing) for thing in (model, model[0].weight, optimizer, optimizer._amp_state)]
    del model, optimizer
    assert are_dropped(*watched)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0  # the scaler is updated nevertheless


@needs_device
@pytest.mark.parametrize("place", ["in a buffer", "elsewhere"])
def test_a_skipped_step_leaves_what_a_script_has_written(place):
    model, optimizer = make("O2")
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if place == "elsewhere":
        model[0].weight.data = torch.zeros(40, device=DEVICE, dtype=torch.float16)[:35].view(7, 5)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)  # an average that is swapped in
    backward(model, optimizer, bad=True)
    model[0].weight.grad = None
    optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert all((p == 0.5).all() for p in model.parameters())
