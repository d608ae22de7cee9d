# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks that run in two processes; each prints the result of a check, and continues with the next one.

A check does all that the processes do together first, and asserts then, so that a failure leaves none waiting.
"""

import contextlib
import copy
import functools
import itertools
import pickle
import random
import sys
import traceback
import warnings
from unittest import mock

import processes
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from small_programs import KINDS, WITH_MASTERS, Weights, assert_values, backward, start, step_on, values, vector
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex_npu import amp, optimizers
from apex_npu.parallel import convert_syncbn_model

DDP = nn.parallel.DistributedDataParallel
CHECKS = {}


def check(*cases):
    def add(function):
        CHECKS.update({"-".join([function.__name__, *map(str, case)]): (function, case) for case in cases or [()]})
        return function

    return add


def gathered(tensors):
    """What both have, in the order of ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, values(tensors))
    return found


def assert_equal(model, value):
    for found in gathered(model.parameters()):
        assert_values(found, value)


def own_input(rank):
    """Gradients of rank 0 and of rank 1: 1 and 3, whose mean is 2."""
    return vector(*[1.0 + 2.0 * rank] * 3)


def train(model, optimizer, forward=None, steps=1):
    for _ in range(steps):
        step_on((forward or model)(own_input(dist.get_rank())), optimizer)


class Float32Backward(torch.autograd.Function):
    """A product whose backward returns float32 gradients for weights of any dtype, as kernels for NPUs do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w.float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, (grad * x).float()


@check(*itertools.product(WITH_MASTERS, ("ddp", "combine_ddp"), ("fused", "torch")))
def gradients_of_another_dtype_are_averaged(level, way, kind):
    """Inside of a block autograd casts them; between blocks a script can still assign float32 ones."""
    model = Weights(10.0)
    model.forward = lambda x: Float32Backward.apply(x, model.w[0]).sum()
    options = {"combine_grad": True, "combine_ddp": True} if way == "combine_ddp" else {}
    model, optimizer = start(model, kind=kind, level=level, **options)
    forward = DDP(model) if way == "ddp" else model
    train(model, optimizer, forward)
    assert_equal(model, 8.0)
    backward(forward(own_input(dist.get_rank())), optimizer)
    assert model.w[0].grad.dtype == torch.float32
    model.w[0].grad = torch.full((3,), 1.0, device=DEVICE)
    optimizer.step()
    assert_equal(model, 7.0)


def parallel(model, params=None, level="O1", kind="combine_grad"):
    options = {} if kind == "combine_grad" else {"combine_grad": True}
    return start(model, params, kind, level, combine_ddp=True, **options)


# ---------------------------------------------------------------------------------------------------------- combine_ddp


@check(("O0", "fused"), ("O1", "combine_grad"), ("O1", "fused"), ("O2", "combine_grad"), ("O2", "fused"))
def combine_ddp_taken_back_by_the_script(level, kind):
    model, optimizer = parallel(Weights(10.0), level=level, kind=kind)
    optimizer.combine_ddp = False
    optimizer.accelerate = False
    train(model, optimizer)
    assert_values(gathered(model.parameters())[dist.get_rank()], 9.0 - 2.0 * dist.get_rank())


@check(*itertools.product(WITH_MASTERS, ("torch", "fused")))
def weights_are_broadcast_after_a_step(level, kind):
    """Of the first process, whose own step they are here as they are there."""
    model, optimizer = start(Weights(10.0), None, kind, level)
    train(model, optimizer)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, steps=1 if DEVICE.type == "cpu" else 2)
    if DEVICE.type == "cpu":
        assert not caught
        assert_values(model.parameters(), 8.0 - 2.0 * dist.get_rank())
    else:  # rank 0 has sent its own values
        assert [("does not count" in str(warning.message)) for warning in caught] == [True] * dist.get_rank()


def start_exact(value, level, kind, params=slice(None)):
    """A model with weights of ``value``, more than low precision holds, and what gives their float32 values."""
    options = {"store_param_remainders": True} if kind == "remainders" else {}
    model = Weights(value, value)
    kind = "fused" if kind == "remainders" else kind
    model, optimizer = start(model, list(model.parameters())[params], kind, level, loss_scale=1.0, **options)

    return model, optimizer, lambda: list(model.state_dict().values())


EXACT = [*itertools.product(WITH_MASTERS, ("torch", "fused")), ("O5", "remainders")]
ROUNDED = {"O2": 1.0 + 2.0**-9, "O5": 1.0 + 2.0**-6}


def own_value(level):
    """Of both processes it is rounded to ROUNDED, in float16 or bfloat16; the rest is their own."""
    return ROUNDED[level] + 2.0 ** -(14 + dist.get_rank())


def send_weights(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


@check(*EXACT)
def weights_are_broadcast_before_the_first_block(level, kind):
    """Nothing of the values that a process had itself is left in what is trained, whoever wrote, and what it wrote."""
    found = []
    for step_without_block in (False, True):
        model, optimizer, exact = start_exact(own_value(level), level, kind)
        send_weights(model)
        if step_without_block:
            (0.0 * model(own_input(0))).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(gathered(exact()))
        for _ in range(2):  # what the second finds has been trained
            backward(0.0 * model(own_input(0)), optimizer)
            found.append(gathered(exact()))
        amp.shutdown()
    for ranks in found:
        for tensors in ranks:
            assert_values(tensors, ROUNDED[level], ROUNDED[level])


@check(("O2", "torch"), ("O2", "fused"), ("O5", "torch"))
def a_module_that_was_added_is_broadcast(level, kind):
    """DistributedDataParallel sends its rounded weights, and amp the float32 values of these."""
    rank = dist.get_rank()
    cls, options = KINDS[kind]
    model = nn.Sequential(nn.Linear(3, 3)).to(DEVICE)
    model, optimizer = amp.initialize(
        model, cls(model.parameters(), lr=0.01), opt_level=level, loss_scale=1.0, verbosity=0, **options
    )
    torch.manual_seed(rank)
    model.append(nn.Linear(3, 1).to(DEVICE, next(model.parameters()).dtype))
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    for _ in range(3):
        backward(model(torch.randn(2, 3, device=DEVICE)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    DDP(model)
    with amp.float32_params(optimizer):
        found = gathered(model.parameters())
    torch.testing.assert_close(*found, rtol=0, atol=0)


@check(*[case for case in EXACT if "remainders" not in case])
def weights_are_broadcast_and_unfrozen_later(level, kind):
    model, optimizer, exact = start_exact(own_value(level), level, kind, params=slice(1))
    model.w[1].requires_grad_(False)
    send_weights(model)
    backward(0.0 * model(own_input(0)), optimizer)
    model.w[1].requires_grad_(True)
    optimizer.add_param_group({"params": [model.w[1]]})
    backward(0.0 * model(own_input(0)), optimizer)
    for tensors in gathered(exact()):
        assert_values(tensors, ROUNDED[level], ROUNDED[level])


@check(*EXACT)
def float32_values_that_all_processes_have_are_kept(level, kind):
    """Those that they have loaded since ``initialize``, that DistributedDataParallel has sent, or that are copied."""
    loaded = own_value(level) if dist.get_rank() == 0 else 0.0
    loaded = torch.tensor(loaded, dtype=torch.float64)
    dist.broadcast(loaded, src=0)
    loaded = loaded.item()
    found = []

    def train_on(model, optimizer, exact):
        backward(0.0 * model(own_input(0)), optimizer)
        found.append(gathered(exact()))
        amp.shutdown()

    saved = start_exact(loaded, level, kind)
    checkpoint = copy.deepcopy((saved[0].state_dict(), saved[1].state_dict()))
    amp.shutdown()
    model, optimizer, exact = start_exact(own_value(level), level, kind)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    send_weights(model)
    train_on(model, optimizer, exact)

    model, optimizer, exact = start_exact(own_value(level), level, kind)
    train_on(DDP(model).module, optimizer, exact)

    model = Weights(loaded, loaded)
    wrapped = DDP(model)
    options = {"store_param_remainders": True} if kind == "remainders" else {}
    model, optimizer = start(model, kind="fused" if options else kind, level=level, loss_scale=1.0, **options)
    backward(0.0 * wrapped(own_input(0)), optimizer)
    found.append(gathered(model.state_dict().values()))
    for ranks in found:
        for tensors in ranks:
            assert_values(tensors, loaded, loaded)


@check(("O1",), ("O2",))
def combine_ddp_follows_its_attributes(level):
    rank = dist.get_rank()
    own, average = 1.0 + 2.0 * rank, 2.0
    model, optimizer = parallel(Weights(10.0), level=level)
    expected = 10.0
    for name, value, step in (("accelerate", False, own), ("accelerate", True, average), ("combine_ddp", False, own)):
        setattr(optimizer, name, value)
        train(model, optimizer)
        expected -= step
        assert_values(model.parameters(), expected)
    backward(model(own_input(rank)), optimizer)
    with pytest.raises(RuntimeError, match="combine_ddp was changed between"):
        optimizer.combine_ddp = True
    optimizer.step()
    optimizer.zero_grad()
    optimizer.combine_ddp = True
    assert optimizer.combine_ddp
    train(model, optimizer)
    assert_values(model.parameters(), expected - own - average)


@check(("O1",), ("O2",))
def parameters_of_no_model_keep_their_values(level):
    rank = dist.get_rank()
    model = Weights(10.0)
    classes = nn.Parameter(torch.full((3,), 20.0 + rank, device=DEVICE))
    parallel(model, [*model.parameters(), classes], level=level)
    assert_values(gathered([classes])[rank], 20.0 + rank)


def with_shards(level, **options):
    """A model and its optimizer, unequal parts of a classifier and theirs."""
    model = Weights(10.0)
    classes = nn.Parameter(torch.full((3 + dist.get_rank(),), 20.0, device=DEVICE))
    other = torch.optim.SGD([classes], lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"combine_grad": True, "combine_ddp": True, "verbosity": 0, **options}
    model, (optimizer, other) = amp.initialize(model, [optimizer, other], opt_level=level, **options)
    return model, optimizer, classes, other


@check(("O1",), ("O2",))
def an_overflow_of_one_shard(level):
    rank = dist.get_rank()
    model, optimizer, classes, other = with_shards(level, dynamic_init_scale=64.0)
    other.combine_ddp = False
    for step in range(2):
        loss = model(own_input(rank)) + (classes * (rank + 1.0)).sum() * (torch.inf if rank > step else 1.0)
        backward(loss, [optimizer, other])
        for one in (optimizer, other):
            one.step()
            assert amp.last_step(one).applied == (step == 1)
            one.zero_grad()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32.0
    assert_values(model.parameters(), 8.0)
    assert_values([classes], 19.0 - rank)


@check(("O1",))
def unequal_shards_are_not_averaged(level):
    model, optimizer, classes, other = with_shards(level)
    loss = model(own_input(dist.get_rank())) + classes.sum()
    with pytest.raises(RuntimeError, match="combine_ddp = False"):
        backward(loss, [optimizer, other])
    assert_values([*model.parameters(), classes], 10.0, 20.0)


@check(("O1",), ("O2",))
def shards_of_unequal_length_run(level):
    rank = dist.get_rank()
    model, optimizer, classes, other = with_shards(level, loss_scale=64.0)
    other.combine_ddp = other.accelerate = False
    loss = model(own_input(rank)) + (classes * (rank + 1.0)).sum()
    backward(loss, [optimizer, other])
    optimizer.step()
    other.step()
    assert_values(model.parameters(), 8.0)
    assert_values([classes], 19.0 - rank)


# --------------------------------------------------------------------------------------------- DistributedDataParallel


@check(*[(level,) for level in WITH_MASTERS])
def ddp_sends_what_has_no_master(level):
    """Frozen weights and buffers, of which the first process, or the other, has more than low precision holds."""
    more = 0.5 + 2.0**-20
    first, second = ((more, 0.5, more), (0.5, more, 1 / 3))
    own = (first, second)[dist.get_rank()]
    model = Weights(10.0, *own[:2])
    model.register_buffer("table", torch.full((3,), own[2], device=DEVICE))
    model.w[1:].requires_grad_(False)
    model, optimizer = start(model, [model.w[0]], level=level)
    wrapped = DDP(model)
    names = ("w.0", "w.1", "w.2", "table")
    for found in gathered(map(model.state_dict().get, names)):
        assert_values(found, 10.0, *first)
    train(model, optimizer, wrapped)
    amp.shutdown()
    for found in gathered(map(model.state_dict().get, names)):
        assert_values(found, 10.0 - 2.0, *first)


@check(*[(level, kind) for level in ("O0", "O1", "O2", "O3", "O5") for kind in ("torch", "fused")])
def initialize_inside_of_ddp(level, kind):
    model = Weights(10.0)
    wrapped = DDP(model)

    _, optimizer = start(model, kind=kind, level=level)
    train(model, optimizer, wrapped, steps=2)
    assert_equal(model, 6.0)


@check(("O1",), ("O4",), ("O5",))
def zero_redundancy_optimizer(level):
    """As its refusal at levels with masters says. Steps of which bfloat16 would lose each one add up."""
    steps, lr = 16, 2.0**-13
    options = {"store_param_remainders": True} if level == "O5" else {}
    model = Weights(1.0, 1.0)  # one for each process
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizers.NpuFusedSGD, lr=lr)
    given = zero.optim if options else zero
    amp.initialize(model, given, opt_level=level, verbosity=0, **options)
    wrapped = DDP(model)
    for _ in range(steps):
        backward(wrapped(own_input(dist.get_rank())), given)
        zero.step()
        zero.zero_grad()
    for found in gathered(model.parameters()):
        assert_values(found, *[1.0 - 2.0 * lr * steps] * 2)


@check()
def wrappers_that_cannot_be_rebuilt():
    def refused(found, options=None, level="O2", **initialize_options):
        model = Weights(10.0)
        wrapped = DDP(model, **options or {})
        if options is None:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        with pytest.raises(RuntimeError, match=f"DistributedDataParallel.*{found}"):
            start(model, level=level, **initialize_options)
        wrapped(own_input(dist.get_rank())).backward()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert_values([p.grad for p in model.parameters()], 2.0)

    refused("with a communication hook: opt_level O2 casts .* amp.initialize first")
    others = dist.new_group([0, 1])
    refused("with a process group other than the default", {"process_group": others})
    refused("which averages gradients itself", {}, combine_grad=True, combine_ddp=True)


@check()
def a_failure_inside_of_ddp():
    """Parameters are put back, and averaged as before; so they are after an ``initialize`` that succeeds."""
    model = Weights(10.0)
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    failing = mock.patch("apex_npu.amp.frontend.keep_values", side_effect=ZeroDivisionError)
    with failing, pytest.raises(ZeroDivisionError):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    wrapped(own_input(dist.get_rank())).backward()
    assert_values([p.grad for p in model.parameters()], 2.0)


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused", "fuse_unscale")])
def no_sync_with_delay_unscale(level, kind):
    """One step over two blocks, the first of them where DDP does not synchronise."""
    model, optimizer = start(Weights(10.0), kind=kind, level=level)
    wrapped = DDP(model)
    x = own_input(dist.get_rank())
    with wrapped.no_sync():
        backward(wrapped(x), optimizer, delay_unscale=True)
    backward(wrapped(x), optimizer)
    optimizer.step()
    assert_equal(model, 6.0)


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused")])
def no_sync_by_a_scaler(level, kind):
    """Its blocks are still open when ``no_sync`` ends."""
    model, optimizer = start(Weights(10.0), kind=kind, level=level)
    wrapped, scaler = DDP(model), amp.AmpScaler(optimizer)
    x = own_input(dist.get_rank())
    for clipped in (1.0, 4.0):
        with wrapped.no_sync():
            scaler.scale(wrapped(x)).backward()
        scaler.scale(wrapped(x)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(amp.masters_of(model.parameters()), clipped)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_equal(model, 5.0)
    with wrapped.no_sync():
        scaler.scale(wrapped(x)).backward()
    if level in WITH_MASTERS:
        with pytest.raises(RuntimeError, match=r"no_sync\(\).*unscale_\(\)"):
            scaler.unscale_(optimizer)


@check(("O1", "torch"), ("O1", "fused"), ("O2", "torch"), ("O2", "fused"), ("O2", "fuse_unscale"))
def two_wrappers_of_one_optimizer(level, kind):
    """A forward of one under ``no_grad`` keeps no gradients of the other; those of one wait for its own average."""
    models = [Weights(10.0), Weights(20.0)]
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0}
    optimizer = start(nn.ModuleList(models), kind=kind, level=level, **options)[1]
    first, second = map(DDP, models)
    x = own_input(dist.get_rank())
    found, refusals = [], []

    def step():
        try:
            optimizer.step()
        except RuntimeError as error:
            refusals.append(str(error))
        found.append(gathered([*models[0].parameters(), *models[1].parameters()]))

    for _ in range(2):
        with torch.no_grad():
            second(x)
        backward(first(x), optimizer)
        step()
        optimizer.zero_grad()
    backward(second(x), optimizer)
    with torch.no_grad():
        second(x)
    backward(first(x), optimizer)
    step()
    optimizer.zero_grad()
    with first.no_sync():
        backward(first(x), optimizer)
    backward(second(x), optimizer)
    step()
    backward(first(x), optimizer)
    step()
    for ranks, expected in zip(found, [(8.0, 20.0), (6.0, 20.0), (4.0, 18.0), (4.0, 18.0), (0.0, 16.0)], strict=True):
        for one in ranks:
            assert_values(one, *expected)
    assert len(refusals) == 1
    assert "no_sync()" in refusals[0]


@check(*itertools.product(WITH_MASTERS, KINDS), ("O0", "fuse_unscale"), ("O1", "fuse_unscale"))
def gradients_in_buckets(level, kind):
    """What one backward leaves in buckets counts once and unscaled, though another one writes there; no warning."""
    x = own_input(dist.get_rank())
    scale = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0}
    moved, moved_alone, texts, shown = [], [], [], []

    def block(wrapped, optimizer, only=None, error=None):
        with amp.scale_loss(wrapped(x, only), optimizer) as scaled_loss:
            scaled_loss.backward()
            if error is not None:
                raise error

    def programs(model, wrapped, optimizer):
        """Each with the number of its average gradients, which all are 2."""
        yield [functools.partial(optimizer.zero_grad, set_to_none=False)], 1, "block"
        yield [functools.partial(optimizer.zero_grad, set_to_none=False)], 1, "block"
        yield [optimizer.zero_grad, lambda: wrapped(x).backward()], 2, "block"
        yield [optimizer.zero_grad, lambda: block(wrapped, optimizer)], 2, "block"
        if level in WITH_MASTERS:
            yield [optimizer.zero_grad, lambda: block(wrapped, optimizer)], 1, "failure"
            yield [], 2, "block"  # a step leaves gradients, as in torch
            # With fuse_unscale gradients count as scaled until the optimizer's own zero_grad.
            clear = optimizer.zero_grad if kind == "fuse_unscale" else model.zero_grad
            yield [clear, lambda: wrapped(x).backward()], 2, "block"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # In the first forward after the first backward buckets are laid out again, but for those of the last.
        for first, options in ((0, {}), (3, {}), (3, {"static_graph": True}), (0, {"find_unused_parameters": True})):
            model, optimizer = start(Weights(100.0), kind=kind, level=level, **scale)
            wrapped = DDP(model, gradient_as_bucket_view=True, **options)
            listed = list(programs(model, wrapped, optimizer))
            for before, count, last in listed[first:] + listed[:first]:
                weight = values(model.parameters())[0]
                for action in before:
                    action()
                if last == "block":
                    block(wrapped, optimizer)
                else:
                    with pytest.raises(ZeroDivisionError):
                        block(wrapped, optimizer, error=ZeroDivisionError())
                optimizer.step()
                moved.append((weight - values(model.parameters())[0], 2.0 * count))
            amp.shutdown()
        model, optimizer = start(Weights(100.0, 200.0), kind=kind, level=level, **scale)
        wrapped = DDP(model, gradient_as_bucket_view=True, find_unused_parameters=True)
        block(wrapped, optimizer)
        (before,) = values([model.w[1].grad])
        block(wrapped, optimizer, only=[0])
        shown = [before, *values([model.w[1].grad])]
        optimizer.step()
        moved_alone = values(model.parameters())
    texts = [str(warning.message) for warning in caught if "find_unused" not in str(warning.message)]
    for found, expected in moved:
        assert_values([found], expected)
    assert_values(moved_alone, 96.0, 198.0)
    assert torch.equal(*shown)
    assert not texts, texts


def pickled(objects):
    return pickle.loads(pickle.dumps(objects))


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused")])
def copies_of_a_wrapper(level, kind):
    """They average, in either order, and what their ``no_sync`` leaves to a process waits for its average."""
    x = own_input(dist.get_rank())
    for copied in (copy.deepcopy, pickled):
        for order in (1, -1):
            model, optimizer = start(
                Weights(10.0), kind=kind, level=level, loss_scale="dynamic", dynamic_init_scale=64.0
            )
            wrapped, optimizer = copied((DDP(model), optimizer)[::order])[::order]
            train(wrapped.module, optimizer, wrapped)
            averaged = gathered(wrapped.module.parameters())
            with wrapped.no_sync():
                backward(wrapped(x), optimizer)
            refusal = None
            try:
                optimizer.step()
            except RuntimeError as error:
                refusal = str(error)
            backward(wrapped(x), optimizer)
            optimizer.step()
            accumulated = gathered(wrapped.module.parameters())
            amp.shutdown()
            assert_values(averaged[0], 8.0), assert_values(averaged[1], 8.0)
            assert "inside of DistributedDataParallel.no_sync()" in str(refusal)
            assert_values(accumulated[0], 4.0), assert_values(accumulated[1], 4.0)


@check()
def a_wrapper_that_is_loaded_without_amp():
    """At its level, as its optimizer is loaded with it; it averages, though there is no amp that would know of it."""
    model, optimizer = start(Weights(10.0), level="O2")
    saved = pickle.dumps((DDP(model), optimizer))
    amp.shutdown()
    wrapped, _ = pickle.loads(saved)
    (param,) = wrapped.parameters()
    wrapped(own_input(dist.get_rank())).backward()
    assert param.dtype == torch.float16
    assert_values([param.grad], 2.0)


# ------------------------------------------------------------------------------------------------- several optimizers


class Product(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value, device=DEVICE))

    def forward(self, x):
        return self.w * x


@check(*itertools.product(("O1", *WITH_MASTERS), ("fused", "torch"), ("plain", "views", "no_sync")))
def a_loss_that_reaches_the_parameters_of_another_optimizer(level, kind, way):
    """Gradients of blocks of the other one are its own alone, whether or not they wait for a later block."""
    models = [Product(1.0), Product(2.0)]
    pair = [KINDS[kind][0](m.parameters(), lr=1 / 16) for m in models]
    options = {"opt_level": level, "loss_scale": 8.0, "num_losses": 2, "verbosity": 0}
    models, (of_first, of_second) = amp.initialize(models, pair, **options)
    first, second = (DDP(m, gradient_as_bucket_view=way == "views") for m in models)
    x, count = own_input(dist.get_rank()), 2 if way == "no_sync" else 1
    found, expected, refusals = [], [[1.0, 2.0]], []
    for _ in range(3):
        for micro in range(count):
            with contextlib.ExitStack() as stack:
                if micro < count - 1:
                    stack.enter_context(first.no_sync()), stack.enter_context(second.no_sync())
                try:
                    backward(second(x).float().sum(), of_second, loss_id=0)
                except RuntimeError as error:
                    refusals.append(str(error))
                backward(second(first(x)).float().sum(), of_first, loss_id=1)
        try:
            of_second.step()
        except RuntimeError as error:  # gradients of float32 parameters are not set aside
            refusals.append(str(error))
        of_first.step()
        of_first.zero_grad(), of_second.zero_grad()
        found.append([m.state_dict()["w"].mean().item() for m in models])
        a, b = expected[-1]
        expected.append([a - count * 2.0 * b / 16, b - (count * 2.0 / 16 if level in WITH_MASTERS else 0.0)])
    assert ["alone also reaches" in text for text in refusals] == [True] * (0 if level in WITH_MASTERS else 3 * count)
    assert found == expected[1:]


@check(*[(level,) for level in WITH_MASTERS])
def float32_gradients_in_bucket_views_of_another_optimizer_are_kept(level):
    torch.manual_seed(0)
    models = [nn.Linear(3, 3).to(DEVICE), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(DEVICE)]
    pair = [torch.optim.SGD(m.parameters(), lr=0.0) for m in models]
    options = {"opt_level": level, "loss_scale": 8.0, "num_losses": 2, "verbosity": 0}
    models, (of_first, of_second) = amp.initialize(models, pair, **options)
    first, second = (DDP(m, gradient_as_bucket_view=True, broadcast_buffers=False) for m in models)
    x, grads = torch.randn(8, 3).to(DEVICE), []
    for _ in range(3):
        backward(second(x).float().square().sum(), of_second, loss_id=0)
        grads += values([p.grad for p in models[1].parameters()])
        backward(second(first(x)).float().sum() * 3, of_first, loss_id=1)
        grads += values([p.grad for p in models[1].parameters()])
        of_second.step(), of_first.step()
        of_second.zero_grad(), of_first.zero_grad()
    for i in range(0, len(grads), 8):
        for before, after in zip(grads[i : i + 4], grads[i + 4 : i + 8], strict=True):
            torch.testing.assert_close(after.float(), before.float(), rtol=0, atol=0)


@check(*itertools.product(("O0", "O1", *WITH_MASTERS), ("fused", "torch")))
def a_block_for_each_optimizer_of_one_wrapper(level, kind):
    """A reducer that looks for unused parameters also looks at the gradients of the other optimizer."""
    model = Weights(4.0, 4.0)
    pair = [KINDS[kind][0]([p], lr=1.0) for p in model.w]
    model, pair = amp.initialize(model, pair, opt_level=level, loss_scale=8.0, num_losses=2, verbosity=0)
    wrapped = DDP(model, find_unused_parameters=True)
    for _ in range(2):
        for i, optimizer in enumerate(pair):
            backward(wrapped(own_input(dist.get_rank()), only=[i]), optimizer, loss_id=i)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for found in gathered(model.parameters()):
        assert_values(found, 0.0, 0.0)


@check(*itertools.product(WITH_MASTERS, ("fused", "torch"), (False, True)))
def small_gradients_are_accumulated_in_bucket_views(level, kind, views):
    model = Product(0.0)
    optimizer = KINDS[kind][0](model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=2.0**16, verbosity=0)
    wrapped, sums = DDP(model, gradient_as_bucket_view=views), []
    for _ in range(2):
        for factor in (2.0**-26, 2.0**-20):
            backward(wrapped(torch.ones(3, device=DEVICE)).float().sum() * factor, optimizer)
        sums += values([model.w.grad * 2.0**26])
        optimizer.step()
        optimizer.zero_grad()
    assert [one.tolist() for one in sums] == [[65.0] * 3] * 2


@check(*itertools.product(("O1", *WITH_MASTERS), ("fused", "torch"), ("overflow", "growth")))
def uneven_inputs_with_a_dynamic_scale(level, kind, event):
    """After DDP's join the processes have one loss scale, though one of them has run more blocks."""
    model, optimizer = start(
        Weights(100.0), kind=kind, level=level, loss_scale="dynamic", dynamic_init_scale=64.0, scale_window=3
    )
    wrapped, rank, moved, scales = DDP(model), dist.get_rank(), [], []
    extra = [1.0] if event == "growth" else [float("inf")]
    for _ in range(3):
        with wrapped.join():
            for value in [1.0, 1.0] + extra * rank:
                step_on(wrapped(vector(*[value] * 3)), optimizer)
        before = model.state_dict()["w.0"].clone()
        step_on(wrapped(own_input(rank)), optimizer)
        moved += values([before - model.state_dict()["w.0"]])
        scales.append(amp.state_dict()["loss_scaler0"])
    everywhere = [None] * 2
    dist.all_gather_object(everywhere, scales)
    for found in moved:
        assert_values([found], 2.0)
    assert everywhere[0] == everywhere[1]


WRAPPINGS = ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True})


class Accumulation:
    """A model in DistributedDataParallel, trained by ``step(optimizer)`` or by plain torch."""

    def __init__(self, options, optimizer_of):
        self.model = Weights(10.0, 20.0)
        self.optimizer = optimizer_of(self.model)
        self.wrapped = DDP(self.model, **options)

    def forward(self, x, how, only):
        """The loss; ``how`` says where synchronisation is off, or what else uses the model."""
        if how == "flag":
            self.wrapped.require_backward_grad_sync = False
        with self.wrapped.no_sync() if how in ("no_sync", "forward alone") else contextlib.nullcontext():
            loss = self.wrapped(x, only)
        if how == "no_grad between":
            with torch.no_grad():
                self.wrapped(x, only)
        return loss

    def around_backward(self, how):
        return self.wrapped.no_sync() if how in ("no_sync", "backward alone") else contextlib.nullcontext()

    def after_backward(self):
        self.wrapped.require_backward_grad_sync = True


def random_micro_batches(rng, options):
    """Steps, each of some micro-batches, of which the last one synchronises."""
    hows = ["no_sync", "sync", "flag", "forward alone", "backward alone", "no_grad between"]
    if "static_graph" in options:  # whose first backward torch wants to be synchronised
        yield True, "sync", None
    for _ in range(3):
        count = rng.randint(1, 4)
        for i in range(count):
            last = i == count - 1
            only = rng.choice([None, [0]]) if "find_unused_parameters" in options and not last else None
            yield last, rng.choice(["sync", "no_grad between"] if last else hows), only


@check(*[(level, kind) for level in ("O1", *WITH_MASTERS) for kind in ("torch", "fused", "fuse_unscale")])
def accumulation_programs(level, kind, seeds=range(12)):
    """What one training loop gives with plain torch in float32, where all numbers are exact, it gives under amp."""
    rank = dist.get_rank()
    for seed in seeds:
        rng = random.Random(seed)
        options = rng.choice(WRAPPINGS)
        dynamic = rng.random() < 0.5
        scale = {"loss_scale": "dynamic", "dynamic_init_scale": 64.0} if dynamic else {"loss_scale": 64.0}
        optimizer_of = functools.partial(start, kind=kind, level=level, **scale)
        ours = Accumulation(options, lambda model, start=optimizer_of: start(model)[1])
        plain = Accumulation(options, lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        for last, how, only in random_micro_batches(rng, options):
            numbers = [rng.randint(1, 4) for _ in range(2)]  # for each process
            overflow = dynamic and rng.random() < 0.1
            x = vector(*[float(numbers[rank])] * 3) * (torch.inf if overflow and rank == 1 else 1.0)
            loss, plain_loss = ours.forward(x, how, only), plain.forward(x, how, only)
            with ours.around_backward(how):
                backward(loss, ours.optimizer)
            with plain.around_backward(how):
                plain_loss.backward()
            ours.after_backward(), plain.after_backward()
            if not last:
                continue
            finite = all(bool(p.grad.isfinite().all()) for p in plain.model.parameters())
            if finite:
                plain.optimizer.step()
            ours.optimizer.step()
            assert amp.last_step(ours.optimizer).applied == finite, (seed, how)
            ours.optimizer.zero_grad(), plain.optimizer.zero_grad()
            assert_values(ours.model.parameters(), *values(plain.model.parameters()))
        found = [None, None]
        dist.all_gather_object(found, [amp.state_dict(), values(ours.model.parameters())])
        assert str(found[0]) == str(found[1])
        amp.shutdown()


@check(("O1", "dynamic"), ("O2", "dynamic"), ("O2", 64.0), ("O5", 1.0))
def a_step_with_gradients_of_one_process(level, loss_scale):
    model, optimizer = start(Weights(10.0), level=level, loss_scale=loss_scale, dynamic_init_scale=64.0)
    wrapped = DDP(model)
    x = own_input(dist.get_rank())
    with wrapped.no_sync():
        backward(wrapped(x), optimizer)
    with pytest.raises(RuntimeError, match=r"no_sync\(\).* step\(\)"):
        optimizer.step()
    assert_values(model.parameters(), 10.0)
    optimizer.zero_grad()
    train(model, optimizer, wrapped)
    assert_equal(model, 8.0)
    rewrapped = DDP(model)  # made after the first block; the former is gone
    del wrapped
    with rewrapped.no_sync():
        backward(rewrapped(x), optimizer)
    backward(rewrapped(x), optimizer)
    optimizer.step()
    assert_equal(model, 4.0)


@check()
def a_step_that_torch_takes():
    """Without masters and with a static scale nothing needs averages."""
    model, optimizer = start(Weights(10.0), level="O1")
    wrapped = DDP(model)
    with wrapped.no_sync():
        train(model, optimizer, wrapped)
    assert_values(model.parameters(), 9.0 - 2.0 * dist.get_rank())


@check()
def gradients_can_be_clipped_before_they_are_averaged():
    """Without masters they are unscaled after each block, as in plain torch."""
    model, optimizer = start(Weights(10.0), level="O1", loss_scale="dynamic", dynamic_init_scale=64.0)
    wrapped = DDP(model)
    x = own_input(dist.get_rank())
    with wrapped.no_sync():
        backward(wrapped(x), optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 2.0)  # 1 and 2
    backward(wrapped(x), optimizer)
    optimizer.step()
    assert_equal(model, 10.0 - (1.5 + 2.0))


# ------------------------------------------------------------------------------------------------- batch norms


@check()
def batch_norms_are_synchronised():
    rank = dist.get_rank()
    whole = (torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2)) * 3 + 1).double().requires_grad_()
    norm = convert_syncbn_model(nn.BatchNorm1d(3)).to(DEVICE)
    plain = nn.BatchNorm1d(3).double()
    expected = plain(whole.flatten(0, 1)).view_as(whole)
    (expected**3).sum().backward()
    x = whole.detach()[rank].float().to(DEVICE).requires_grad_()
    found = norm(x)
    (found**3).sum().backward()
    pairs = [(found, expected[rank]), (x.grad, whole.grad[rank])]
    pairs += [(norm.running_mean, plain.running_mean), (norm.running_var, plain.running_var)]
    for own, one in zip(norm.parameters(), plain.parameters(), strict=True):
        pairs.append((sum(found[0] for found in gathered([own.grad])), one.grad))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-5)


def main(names):
    processes.join()
    for name in names or CHECKS:
        function, case = CHECKS[name]
        failure = None
        try:
            function(*case)
        except Exception as error:
            failure = [type(error).__name__, traceback.format_exc()]
        amp.shutdown()
        processes.tell(name, failure)
        dist.barrier()
    processes.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
