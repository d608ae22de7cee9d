# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``fuse_unscale=True``: the same training, with gradients that stay scaled until step."""

import contextlib
import copy
import gc
import math
import warnings
import weakref

import grad_ways
import pytest
import torch
from amp.test_random_programs import FOUND, run_found
from devices import DEVICE, needs
from optimizer_specs import SPECS
from small_programs import Weights, X, assert_values, backward, initialize, start, step_on, vector
from torch import nn

from apex_npu import amp, optimizers
from apex_npu.parallel import LARC

# How 16-bit gradients wait for the step: on a CPU as on a GPU with Triton.
ALIASED = "joined" if DEVICE.type == "npu" else "aliased"


@pytest.fixture(autouse=True, params=["gathered", *(way for way in grad_ways.WAYS if way in ("left", ALIASED))])
def small_gradients(request, monkeypatch):
    """What these models have are all small: also as large ones are treated, which are worked on in their own dtype."""
    grad_ways.use(monkeypatch, request.param)
    return request.param


aliased = pytest.mark.parametrize("small_gradients", [ALIASED], indirect=True)
# Where it does not matter how gradients wait.
gathered = pytest.mark.parametrize("small_gradients", ["gathered"], indirect=True)


def make(level, cls=optimizers.NpuFusedAdam, fuse_unscale=True, loss_scale="dynamic", **options):
    torch.manual_seed(0)
    # Beside float32 gradients an NPU gathers 16-bit ones.
    norm = nn.LayerNorm(6) if DEVICE.type == "npu" and level in ("O2", "O5") else nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
    optimizer = cls(model.parameters(), lr=1e-2)
    return amp.initialize(
        model,
        optimizer,
        opt_level=level,
        loss_scale=loss_scale,
        dynamic_init_scale=2.0**7,
        fuse_unscale=fuse_unscale,
        verbosity=0,
        **options,
    )


def block(model, optimizer, number, bad=False, **options):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    with amp.scale_loss(model(x).float().square().mean(), optimizer, **options) as scaled_loss:
        scaled_loss.backward()
        if bad:
            model[3].bias.grad[0] = math.inf


def finish(optimizer):
    """What has been trained; then amp is off."""
    result = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    return result


@pytest.mark.pairwise
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("name", FOUND)
def test_found_programs(name, level):
    """Those that have differed from plain torch, however gradients wait for the step."""
    run_found(name, level, "fuse_unscale")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_optimizer(spec):
    def run(fuse_unscale):
        model, optimizer = make("O2", lambda params, lr: spec.cls(params, lr=lr), fuse_unscale)
        for number in range(4):
            block(model, optimizer, number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return finish(optimizer)

    torch.testing.assert_close([*run(True)], [*run(False)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_what_grad_holds_before_and_after_step(level, small_gradients):
    model, optimizer = start(Weights(1.0), level=level, fuse_unscale=True)
    backward(model(vector(*X)), optimizer)
    assert_values([model.w[0].grad], 64.0 * torch.tensor(X))
    optimizer.step()
    # An NPU divides what it has gathered with the look for overflow, since its update could not.
    is_divided = DEVICE.type == "npu" and (level != "O2" or small_gradients == "gathered")
    assert_values([model.w[0].grad], (1.0 if is_divided else 64.0) * torch.tensor(X))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 0.0, 3.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_norm_is_that_of_the_true_gradient(level, norm_type):
    norms = []
    for fuse_unscale in (True, False):
        model, optimizer = make(level, fuse_unscale=fuse_unscale)
        assert optimizer.clip_optimizer_grad_norm_fused(1.0, norm_type).item() == 0.0
        block(model, optimizer, 0)
        # Clipping twice: the second norm is that of clipped gradients.
        norms.append([optimizer.clip_optimizer_grad_norm_fused(c, norm_type).item() for c in (1e9, 0.1, 0.05, 1.0)])
        amp.shutdown()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@gathered
@needs("inf")
def test_clipping_refuses_what_is_not_finite_when_asked():
    model, optimizer = make("O1")
    block(model, optimizer, 0, bad=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_optimizer_grad_norm_fused(1.0, error_if_nonfinite=True)


@gathered
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_with_torch_warns(level):
    model, optimizer = make(level)
    block(model, optimizer, 0)
    with pytest.warns(RuntimeWarning, match="fuse_unscale=True keeps multiplied by the loss scale"):
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)


@gathered
def test_a_parameter_of_two_optimizers_is_refused():
    model = nn.Linear(2, 2).to(DEVICE)
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) belongs to two optimizers, SGD and SGD"):
        amp.initialize(model, pair, opt_level="O1", fuse_unscale=True, verbosity=0)


@gathered
def test_a_parameter_that_a_second_optimizer_gets_later_is_refused():
    parts = [nn.Linear(2, 2).to(DEVICE) for _ in range(2)]
    first, second = (torch.optim.SGD(part.parameters(), lr=1.0) for part in parts)
    amp.initialize(parts, [first, second], opt_level="O1", dynamic_init_scale=2.0**7, fuse_unscale=True, verbosity=0)
    second.add_param_group({"params": [parts[0].weight]})

    def loss():
        return parts[0](torch.ones(1, 2, device=DEVICE)).float().sum()

    with pytest.raises(RuntimeError, match="belongs to two optimizers"), amp.scale_loss(loss(), [first, second]):
        pass
    backward(loss(), first)
    with pytest.raises(RuntimeError, match="belongs to two optimizers"), amp.scale_loss(loss(), second):
        pass
    before = parts[0].weight.detach().clone()
    first.step()  # nothing has been lost
    torch.testing.assert_close(parts[0].weight.detach(), before - 1.0)
    first.zero_grad()
    backward(loss(), second)
    second.step()
    torch.testing.assert_close(parts[0].weight.detach(), before - 2.0)


@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("when", ["before the step", "before a block", "after a step"])
def test_a_backward_outside_of_blocks_among_scaled_gradients_is_named(when, level, cls):
    model, optimizer = make(level, cls, loss_scale=64.0)
    block(model, optimizer, 0)
    if when == "after a step" and cls is torch.optim.SGD:
        return  # its step leaves them unscaled
    if when == "after a step" and cls is optimizers.NpuFusedSGD and DEVICE.type == "npu":
        pytest.skip("not named there: the step of lists has not looked at these gradients")
    if when == "after a step":
        optimizer.step()
        model.zero_grad()
    x = torch.ones(8, 6, device=DEVICE)
    model(x).float().sum().backward()
    follow = optimizer.step if when != "before a block" else lambda: block(model, optimizer, 1)
    with pytest.warns(match="a backward outside of amp.scale_loss adds gradients without that factor"):
        follow()


@pytest.mark.parametrize("way", ["prepared", "declared"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_manually_scaled_backwards_are_added_to_scaled_gradients(level, way):
    """Two ways in which recipes scale the loss themselves, each after an ordinary block.

    Gradients that are declared to be scaled wait where backward has left them, as after ``delay_unscale``.
    """
    results = []
    for manual in (None, way):
        model, optimizer = make(level, optimizers.NpuFusedSGD)
        scaler = amp._amp_state.loss_scalers[0]
        block(model, optimizer, 0)
        if manual is None:
            block(model, optimizer, 1, delay_unscale=way == "declared")
        else:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
            loss = model(x).float().square().mean() * scaler.loss_scale()
            if manual == "prepared":
                optimizer._prepare_amp_backward()
            else:
                optimizer._amp_stash.params_have_scaled_gradients = True
            loss.backward()
            if manual == "prepared":
                optimizer._post_amp_backward(scaler)
        block(model, optimizer, 2)
        optimizer.step()
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
        amp.shutdown()
    # Gradients that are declared to be scaled are added in float16: one rounding more.
    atol = 4e-6 if (level, way) == ("O2", "declared") else 1e-6
    torch.testing.assert_close(*results, rtol=1e-6, atol=atol)


@gathered
def test_larc_is_refused():
    model = nn.Linear(2, 2).to(DEVICE)
    larc = LARC(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=r"LARC works on gradients before step\(\).*leave fuse_unscale out"):
        amp.initialize(model, [larc], opt_level="O1", fuse_unscale=True, verbosity=0)
    model, optimizer = make("O1", torch.optim.SGD)
    with pytest.raises(RuntimeError, match="LARC works on gradients"):
        block(model, LARC(optimizer), 0)


@gathered
def test_a_model_without_an_optimizer_is_initialized_while_gradients_are_scaled():
    model, optimizer = make("O1")
    block(model, optimizer, 0)
    frozen = nn.Linear(2, 2).to(DEVICE)
    assert amp.initialize(frozen, opt_level="O1", fuse_unscale=True, verbosity=0) is frozen
    optimizer.step()
    assert amp.last_step(optimizer).applied


def test_after_a_skip_and_model_zero_grad_a_plain_backward_is_not_divided():
    model, optimizer = start(Weights(10.0), level="O0", loss_scale="dynamic", fuse_unscale=True)
    backward(model(vector(*X)) * math.inf, optimizer)
    optimizer.step()
    model.zero_grad()
    model(vector(*X)).backward()
    optimizer.step()
    assert_values(model.parameters(), 10.0 - torch.tensor(X))


def test_a_gradient_that_cannot_be_scaled_leaves_the_others():
    shared, table = nn.Parameter(torch.ones(2, device=DEVICE)), nn.Embedding(3, 2, sparse=True, device=DEVICE)
    parts = nn.ParameterList([shared, table.weight])
    _, optimizer = initialize(
        parts,
        torch.optim.SGD([{"params": [shared]}, {"params": [table.weight]}], lr=1.0),
        "O0",
        loss_scale=4.0,
        combine_grad=True,
        fuse_unscale=True,
    )
    backward(shared.sum(), optimizer)
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    table(torch.tensor([0], device=DEVICE)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"), amp.scale_loss(shared.sum(), optimizer):
        pass
    table.weight.grad = None
    optimizer.step()
    assert shared.tolist() == [0.0, 0.0]


@gathered
@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_step_inside_the_block_is_refused(fuse_unscale, level):
    model, optimizer = make(level, optimizers.NpuFusedSGD, fuse_unscale)
    with amp.scale_loss(model(torch.ones(2, 6, device=DEVICE)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=r"loss scale 128.0: step\(\) was called inside scale_loss"):
            optimizer.step()


@pytest.mark.parametrize("ends", ["backward", "exception", "second exception"])
@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_block_of_another_optimizer_leaves_16_bit_parameters_their_gradients(level, fuses, cls, ends):
    """The loss of a network that makes what another judges gives the judge gradients, too, which nobody wants."""
    networks = [nn.Linear(6, 6).to(DEVICE), nn.Linear(6, 2).to(DEVICE)]
    made = [cls(network.parameters(), lr=1e-2) for network in networks]
    options = {"opt_level": level, "loss_scale": 64.0, "fuse_unscale": fuses, "verbosity": 0}
    (makes, judges), (maker, judge) = amp.initialize(networks, made, **options)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for step in range(2):
        backward(judges(x).float().square().mean(), judge)
        grads = [p.grad.float().clone() for p in judges.parameters()]
        before = {name: value.clone() for name, value in judges.state_dict().items()}
        loss = judges(makes(x)).float().sum()
        with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss, maker) as scaled_loss:
            scaled_loss.backward()
            if ends != "backward" and step == (ends == "second exception"):
                raise ZeroDivisionError
        for p, grad in zip(judges.parameters(), grads, strict=True):
            assert torch.equal(p.grad.float(), grad)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            judge.step()
        judge.zero_grad()
        maker.zero_grad()
        now = judges.state_dict()
        for (name, old), grad in zip(before.items(), grads, strict=True):
            # Remainders of float16 are exact to 2**-26 of a value.
            torch.testing.assert_close(now[name], old - 1e-2 * grad / (64.0 if fuses else 1.0), rtol=2e-6, atol=2e-8)


def alike(run, monkeypatch):
    """``run()`` gives the same with shared gradients and without, and so warns of nothing."""
    results = []
    for how in ("gathered", ALIASED):
        grad_ways.use(monkeypatch, how)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(run())
        amp.shutdown()
    torch.testing.assert_close(*results)


@aliased
@pytest.mark.parametrize("reached", [[1, 3], [3]])
def test_after_an_overflow_a_second_block_finds_zeros(reached, monkeypatch):
    def run():
        model, optimizer = make("O2")
        block(model, optimizer, 0)
        optimizer.step()
        optimizer.zero_grad()
        block(model, optimizer, 1, bad=True)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        for number in range(2):
            output = model(x) if reached == [1, 3] else model[3](torch.ones(8, 8, device=DEVICE))
            backward(output.float().square().mean(), optimizer)
            present = [p.grad is not None for p in model.parameters()]
            optimizer.step()
            assert amp.last_step(optimizer).skipped == (number == 0)
        return [torch.tensor(present), *(p.detach().clone() for p in amp.master_params(optimizer))]

    alike(run, monkeypatch)


@pytest.mark.filterwarnings("ignore:gradients have been added to, written or replaced")
def test_a_model_that_is_moved_between_its_block_and_its_step_takes_gradients_along():
    model = nn.Linear(6, 6).to(DEVICE)
    with torch.no_grad():
        model.weight.copy_(torch.eye(6))
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=1.0)
    model, optimizer = initialize(model, optimizer, "O2", fuse_unscale=True)
    backward(model(torch.ones(2, 6, device=DEVICE)).float().sum(), optimizer)
    model.to("cpu")
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], torch.eye(6) - 2.0)


@gathered
def test_half_gradients_keep_their_digits_when_clipped():
    """1 / 2**12 times a coefficient near 0.006 is subnormal in float16: multiplied in two steps nothing is lost."""
    lengths = []
    for fuse_unscale in (False, True):
        weight = nn.Parameter(torch.ones(64, device=DEVICE))
        _, optimizer = initialize(
            nn.ParameterList([weight]),
            torch.optim.SGD([weight], lr=1.0),
            "O3",
            loss_scale=2.0**12,
            fuse_unscale=fuse_unscale,
        )
        backward(weight.float().sum() * 2e-3, optimizer)
        optimizer.clip_optimizer_grad_norm_fused(1e-4)
        optimizer.step()
        lengths.append(weight.grad.float().norm().item())
        amp.shutdown()
    assert lengths[1] == pytest.approx(lengths[0], rel=1e-3)


@gathered
def test_an_optimizer_keeps_what_its_initialize_said():
    model, optimizer = start(Weights(10.0), kind="torch", level="O0", fuse_unscale=True)
    backward(model(vector(*X)), optimizer)
    _, stranger = start(Weights(10.0), kind="torch", level="O0")
    with pytest.raises(RuntimeError, match=r"optimizers of two amp\.initialize, one with fuse_unscale=True"):
        backward(model(vector(*X)), [optimizer, stranger])
    backward(model(vector(*X)), optimizer)
    optimizer.step()
    assert_values(model.parameters(), 10.0 - 2.0 * torch.tensor(X))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_at_a_loss_scale_of_1_clipping_ends_with_its_gradients(level):
    """A script may continue without blocks then, and clear gradients by the model."""
    model, optimizer = start(Weights(10.0), level=level, loss_scale=1.0, fuse_unscale=True)
    model(vector(*X)).backward()
    optimizer.clip_optimizer_grad_norm_fused(1e-6)
    optimizer.step()
    model.zero_grad()
    model(vector(*X)).backward()
    optimizer.step()
    assert_values(model.parameters(), 10.0 - torch.tensor(X), atol=1e-5)


@pytest.mark.parametrize("cls", [optimizers.NpuFusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("pending", [False, True])
def test_torchs_clipping_at_a_loss_scale_of_1_clips_at_once(pending, cls):
    """The gradients that a script reads after clipping are clipped, once."""
    model, optimizer = make("O5", cls, loss_scale=1.0)
    block(model, optimizer, 0)
    if pending:
        optimizer.clip_optimizer_grad_norm_fused(1e-2)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e-3)
    clipped = [p.grad.clone() for p in amp.master_params(optimizer)]
    torch.testing.assert_close(
        torch.stack([g.float().norm() for g in clipped]).norm().cpu(), torch.tensor(1e-3), rtol=2e-3, atol=0
    )
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    for p, old, grad in zip(amp.master_params(optimizer), before, clipped, strict=True):
        torch.testing.assert_close(p.detach(), old - 1e-2 * grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("blocks_after", [0, 1])
def test_a_gradient_that_cannot_be_gathered_leaves_the_others_as_they_are(blocks_after):
    """They stay scaled."""
    params = [nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(2)]
    optimizer = optimizers.NpuFusedSGD([{"params": [p]} for p in params], lr=1.0)
    _, optimizer = initialize(nn.ParameterList(params), optimizer, "O1", loss_scale=4.0, fuse_unscale=True)

    def block():
        backward(2 * params[0].sum() + 3 * params[1].sum(), optimizer)

    block()
    dense = params[1].grad
    params[1].grad = dense.to_sparse()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sparse gradient"):
            optimizer.step()
    params[1].grad = dense
    for _ in range(blocks_after):
        block()
    optimizer.step()
    assert_values(params, *(1.0 - grad * (1 + blocks_after) for grad in (2.0, 3.0)))


TORCH_FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@gathered
@pytest.mark.skipif(DEVICE.type == "npu", reason="torch_npu's fused optimizers read no grad_scale")
@pytest.mark.pairwise
@pytest.mark.parametrize("cls", TORCH_FUSED)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("options", [{}, {"combine_grad": True}])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_torchs_fused_optimizers_divide_in_their_step(monkeypatch, level, options, clip, cls):
    """By the protocol of GradScaler, and with the values of an unscaling at the end of the block."""
    if cls is torch.optim.Adagrad and DEVICE.type != "cpu":
        pytest.skip("torch's fused Adagrad is for the CPU")
    scales = []
    real = cls.step

    def step(self, *args):
        scales.append(getattr(self, "grad_scale", None))
        return real(self, *args)

    monkeypatch.setattr(cls, "step", step)
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        # No bias before the norm: its gradient is rounding, which Adam magnifies.
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 1)).to(DEVICE)
        optimizer = cls(model.parameters(), lr=0.05, fused=True)
        options_of = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**8, "verbosity": 0, **options}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, fuse_unscale=fuse, **options_of)
        for number in range(6):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            loss = model(x).float().square().mean()
            backward(loss * (torch.inf if number == 2 else 1.0), optimizer)
            if clip:
                optimizer.clip_optimizer_grad_norm_fused(0.1)
            optimizer.step()
            assert amp.last_step(optimizer).applied == (number != 2)
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in amp.master_params(optimizer)])
        amp.shutdown()
    for unscaled, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, unscaled, rtol=1e-5, atol=1e-6)
    assert scales[:5] == [None] * 5
    # Adagrad of torch 2.6 does not say that it reads them: there the block unscales.
    divides = cls is not torch.optim.Adagrad or hasattr(optimizer, "_step_supports_amp_scaling")
    assert all((scale is not None) == divides for scale in scales[5:])


@pytest.mark.parametrize("options", [{"fuse_unscale": True}, {"capturable": True}], ids=["fuse_unscale", "capturable"])
@pytest.mark.parametrize("program", ["first step", "copied", "added"])
def test_gradients_outside_of_blocks_are_stepped(program, options):
    """Of the first step, of copies, and of a group that has been added: as without these options."""

    def trained(fuse_unscale=False, **given):
        torch.manual_seed(0)
        model, other = nn.Linear(4, 4).to(DEVICE), nn.Linear(4, 4).to(DEVICE)
        optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=0.1, **given)
        more = {"fuse_unscale": True} if fuse_unscale else {}
        (model, other), optimizer = amp.initialize(
            [model, other], optimizer, opt_level="O2", loss_scale=8.0, verbosity=0, **more
        )
        x = torch.ones(3, 4, device=DEVICE).half()
        if program != "first step":
            step_on(model(x).float().sum(), optimizer)
        if program == "copied":
            model, optimizer = copy.deepcopy((model, optimizer))
        if program == "added":
            optimizer.add_param_group({"params": list(other.parameters())})
            model = other
        before = [p.detach().clone() for p in model.parameters()]
        model(x).float().sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # step() was called without a block
            optimizer.step()
        moved = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]
        amp.shutdown()
        return moved

    found, wanted = trained(**options), trained()
    assert all(p.any() for p in wanted)
    torch.testing.assert_close(found, wanted)


READERS = {
    "nothing": lambda model, optimizer: None,
    "a hook": lambda model, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "combined gradients": lambda model, optimizer: optimizer.get_optimizer_combined_grads(),
    "clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 2.0**20),
}


@pytest.mark.filterwarnings("ignore:torch.nn.utils.clip_grad_norm_:RuntimeWarning")
@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("reader", [*READERS, "AmpScaler"])
@pytest.mark.parametrize("kind", ["torch", "combine_grad", "fused"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_that_float16_does_not_hold_are_stepped(level, kind, reader, fuse_unscale):
    small = 2.0**-27  # half of the least that float16 holds, without the scale
    options = {"lr": 2.0**20, "loss_scale": 2.0**16, "fuse_unscale": fuse_unscale}
    model, optimizer = start(Weights(0.0), kind=kind, level=level, **options)
    loss = model(vector(*X)) * small
    if reader == "AmpScaler":
        scaler = amp.AmpScaler(optimizer)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert_values([model.w[0].grad], torch.tensor(X) * small)
        scaler.step(optimizer)
    else:
        if reader == "combined gradients" and kind != "fused":
            pytest.skip("there are none, or only with combine_grad")
        backward(loss, optimizer)
        READERS[reader](model, optimizer)
        optimizer.step()
    assert_values(model.state_dict().values(), torch.tensor(X) * -small * 2.0**20)


@gathered
@pytest.mark.parametrize("fuse_unscale", [None, True])
@pytest.mark.parametrize("kind", ["torch", "combine_grad", "fused"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_step_keeps_nothing_of_the_script_alive(level, kind, fuse_unscale):
    model, optimizer = start(Weights(1.0), kind=kind, level=level, fuse_unscale=fuse_unscale, loss_scale="dynamic")

    def iterate():
        batch = vector(*X)
        step_on(model(batch), optimizer)
        return weakref.ref(batch)

    iterate()
    gc.disable()
    try:
        assert [iterate()() for _ in range(3)] == [None] * 3
    finally:
        gc.enable()


class Lookahead(torch.optim.Optimizer):
    """With the attributes that published versions set, which do not call the constructor of their base class."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


@gathered
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_wrapper_that_lacks_the_attributes_of_its_base_class(level):
    model = Weights(10.0)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1.0))
    model, optimizer = initialize(model, optimizer, level, fuse_unscale=True)
    step_on(model(vector(*X)), optimizer)
    assert_values(model.state_dict().values(), 10.0 - torch.tensor(X))
