# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Regions of autocast that a training framework, or a script, enters around the forward of a model, or inside of it.

At O1 and O4 the forward casts as the level says, whatever is around it; a region inside of it counts. What a model
computes is compared with a copy that has the level's dtype by torch.autocast alone.
"""

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from devices import DEVICE, needs
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_npu import amp

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
LOW = {"O1": HALF, "O4": BF16}
OTHER = {"O1": BF16, "O4": HALF}

pytestmark = [pytest.mark.host, needs("autocast_to_bfloat16")]
levels = pytest.mark.parametrize("level", LOW)


def region(dtype=BF16, enabled=True, **options):
    return torch.autocast(DEVICE.type, dtype=dtype, enabled=enabled, **options)


# What may be around a forward. torch.cuda.amp.autocast, the old form, has cache_enabled=True.
AROUND = {
    "nothing": lambda level: contextlib.nullcontext(),
    "off": lambda level: region(enabled=False),
    "off, old form": lambda level: region(enabled=False, cache_enabled=True),
    "another dtype": lambda level: region(OTHER[level]),
    "another dtype, old form": lambda level: region(OTHER[level], cache_enabled=True),
    "the same dtype": lambda level: region(LOW[level]),
    "no cache": lambda level: region(OTHER[level], cache_enabled=False),
}
around = pytest.mark.parametrize("around", AROUND)


class Net(nn.Module):
    """Notes what products come out as."""

    def __init__(self, inside=contextlib.nullcontext):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)
        self.inside = inside

    def forward(self, x):
        hidden = self.first(x)
        self.seen = (hidden.dtype,)
        with self.inside():
            out = self.second(hidden.relu().to(self.second.weight.dtype))
        self.seen = hidden.dtype, out.dtype
        return out


def make(level, *args, lr=0.5, **options):
    """The model at ``level``, its optimizer, and a copy with an optimizer of its own that amp knows nothing of."""
    model = Net(*args).to(DEVICE)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=lr)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0, **options)
    return model, optimizer, twin, other


def batch(seed=0):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def plainly(level, run):
    """``run()`` with the level's dtype by torch.autocast alone."""
    with amp.disable_casts(), region(LOW[level]):
        result = run()
    assert result.requires_grad
    return result


def assert_same(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach()), name


@around
@levels
def test_a_model_casts_by_its_level_whatever_is_around_its_forward(level, around):
    model, optimizer, twin, other = make(level)
    with AROUND[around](level):
        for step in range(3):
            out = model(batch(step))
            assert model.seen == (LOW[level], LOW[level])
            with amp.scale_loss(out.float().square().sum(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(3):
        plainly(level, lambda step=step: twin(batch(step)).float().square().sum()).backward()
        other.step()
        other.zero_grad()
    assert_same(model, twin)


@around
@levels
def test_the_region_around_counts_outside_of_the_forward(level, around):
    model, *_ = make(level)
    x = batch()
    with AROUND[around](level):
        expected = (x @ x.t()).dtype
        model(x)
        assert (x @ x.t()).dtype == nn.functional.linear(x, x).dtype == torch.mv(x, x[0]).dtype == expected
        assert torch.exp(x.to(expected)).dtype == FLOAT
        linear = model.first.weight  # no copy of it in the model's dtype is taken for one in the region's
        assert nn.functional.linear(x, linear).dtype == expected
    assert (x @ x.t()).dtype == LOW[level]


@around
@levels
def test_a_region_inside_of_the_forward_counts(level, around):
    for inside, expected in ((lambda: region(enabled=False), FLOAT), (lambda: region(OTHER[level]), OTHER[level])):
        model, *_ = make(level, inside)
        with AROUND[around](level):
            model(batch())
        assert model.seen == (LOW[level], expected)
        amp.shutdown()


@levels
def test_a_region_without_a_cache_casts_a_weight_to_another_dtype_within_one_forward(level):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            first = self.linear(x)
            with region(OTHER[level], cache_enabled=False):
                return first.dtype, self.linear(x).dtype, self.linear(first.float()).dtype

    model = amp.initialize(Twice().to(DEVICE), opt_level=level, verbosity=0)
    assert model(batch()) == (LOW[level], OTHER[level], OTHER[level])


@around
@levels
def test_disable_casts_counts_inside_and_around(level, around):
    model, *_ = make(level, amp.disable_casts)
    with AROUND[around](level):
        model(batch())
        assert model.seen == (LOW[level], FLOAT)
        with amp.disable_casts():
            model(batch())
            assert model.seen == (FLOAT, FLOAT)
            with amp.disable_casts():
                pass
            model(batch())
            assert model.seen == (FLOAT, FLOAT)
        model(batch())
        assert model.seen == (LOW[level], FLOAT)


@levels
def test_a_region_inside_of_disable_casts_is_torchs_alone(level):
    model, *_ = make(level)
    with amp.disable_casts():
        with region(OTHER[level]):
            model(batch())
        assert model.seen == (OTHER[level], OTHER[level])
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert torch.is_autocast_enabled(DEVICE.type)
    with region(enabled=False):
        model(batch())
    assert model.seen == (LOW[level], LOW[level])


@levels
def test_float_functions_run_a_model_without_casts(level):
    model, *_ = make(level)
    amp.float_function(model)(batch())
    assert model.seen == (FLOAT, FLOAT)


@around
@levels
def test_a_model_inside_of_another_one_keeps_to_the_regions_between(level, around):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with region(enabled=False):
                return self.inner(x)

    inner = Net().to(DEVICE)
    outer = Outer(inner)
    amp.initialize([inner, outer], opt_level=level, verbosity=0)

    def run():
        with AROUND[around](level):
            outer(batch())
            seen = inner.seen
            inner(batch())
        assert (seen, inner.seen) == ((FLOAT, FLOAT), (LOW[level], LOW[level]))

    run()
    thread_errors = []

    def in_thread():
        try:
            run()
        except BaseException as error:
            thread_errors.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert not thread_errors
    assert inner(batch()).dtype == LOW[level]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@around
@levels
def test_training_goes_on_after_inference_in_one_region(level, around, context):
    model, _, twin, _ = make(level)
    with AROUND[around](level):
        with context():
            assert model.eval()(batch()).dtype == LOW[level]
        model.train()(batch()).float().sum().backward()
    plainly(level, lambda: twin(batch()).float().sum()).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


checkpoints = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@pytest.mark.pairwise
@pytest.mark.parametrize("within", [True, False], ids=["backward within", "backward outside"])
@checkpoints
@around
@levels
def test_a_checkpointed_model_is_computed_again_by_the_same_casts(level, around, use_reentrant, within):
    model, _, twin, _ = make(level)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    with AROUND[around](level):
        out = checkpoint(model, x, use_reentrant=use_reentrant)
        seen = model.seen
        model.seen = None
        if within:
            out.float().square().sum().backward()
    if not within:
        with amp.disable_casts():
            out.float().square().sum().backward()
    assert seen == (LOW[level], LOW[level])
    assert set(model.seen) == {LOW[level]}  # which may end before the second product
    plainly(level, lambda: twin(y).float().square().sum()).backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("inside", ["nothing", "another dtype", "no cache", "off, old form"])
@checkpoints
@levels
def test_a_model_checkpointed_without_casts_is_computed_again_without(level, use_reentrant, inside):
    model, *_ = make(level)
    with amp.disable_casts(), AROUND[inside](level):
        out = checkpoint(model, batch().requires_grad_(), use_reentrant=use_reentrant)
    seen, model.seen = model.seen, None
    assert set(seen) == {OTHER[level] if inside in ("another dtype", "no cache") else FLOAT}
    out.sum().backward()
    assert set(model.seen) == set(seen)


class Around(nn.Module):
    """Checkpoints another model, which is given to amp by itself, in a region within its own forward."""

    def __init__(self, inner, region, **options):
        super().__init__()
        self.inner, self.region, self.options = inner, region, options

    def forward(self, x):
        with self.region:
            return checkpoint(self.inner, x, **self.options)


@around
@checkpoints
@levels
def test_a_model_checkpointed_inside_of_another_ones_forward(level, use_reentrant, around):
    inner = Net().to(DEVICE)
    outer = Around(inner, AROUND[around](level), use_reentrant=use_reentrant)
    amp.initialize([outer, inner], opt_level=level, verbosity=0)
    x = batch().requires_grad_()
    out = outer(x)
    seen, inner.seen = inner.seen, None
    out.float().sum().backward()
    assert len(set(seen)) == 1
    assert set(inner.seen) == set(seen)
    assert inner(batch()).dtype == LOW[level]


class Again(torch.autograd.Function):
    """Calls a model in forward, and in backward again, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.save_for_backward(x)
        ctx.model = model
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.model(x)
        out.backward(grad)
        return x.grad, None


@pytest.mark.parametrize("disabled", [True, False])
@around
@levels
def test_a_model_that_a_python_function_calls_again_in_backward(level, around, disabled):
    model, *_ = make(level)
    with amp.disable_casts() if disabled else contextlib.nullcontext():
        out = Again.apply(batch().requires_grad_(), model)
    seen, model.seen = model.seen, None
    assert seen == ((FLOAT, FLOAT) if disabled else (LOW[level], LOW[level]))
    with AROUND[around](level):
        out.float().sum().backward()
    assert model.seen == seen


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Doubled.seen = (grad @ weight.t()).dtype
        return (grad @ weight.t()).to(x.dtype), (x.t() @ grad).to(weight.dtype)


@around
@levels
def test_the_backward_of_python_functions_has_the_casts_of_the_forward(level, around):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, device=DEVICE))

        def forward(self, x):
            return Doubled.apply(x, self.weight)

    model = amp.initialize(Model(), opt_level=level, verbosity=0)
    with AROUND[around](level):
        model(batch()).float().sum().backward()
    assert Doubled.seen == LOW[level]


@pytest.mark.slow  # torch._dynamo is imported, and compiles for each of the states around
@levels
def test_compiled_models_cast_by_their_level(level):
    torch._dynamo.reset()
    model, *_ = make(level, lambda: region(enabled=False))
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def dtypes():
        compiled(batch())
        return model.seen

    for name in AROUND:
        with AROUND[name](level):
            assert dtypes() == (LOW[level], FLOAT), name
    with amp.disable_casts():
        assert dtypes() == (FLOAT, FLOAT)

    @torch.compile(backend="eager", fullgraph=True)
    def without(x):
        with amp.disable_casts():
            return model(x)

    with region(OTHER[level]):
        assert without(batch()).dtype == FLOAT
        assert model.seen == (FLOAT, FLOAT)


@pytest.mark.parametrize("around", [name for name in AROUND if name != "nothing"])
@levels
def test_amp_cannot_be_shut_down_or_replaced_inside_of_a_region(level, around):
    before = torch.is_autocast_enabled(DEVICE.type), torch.is_autocast_cache_enabled()
    model, *_ = make(level)
    with AROUND[around](level), pytest.raises(RuntimeError, match=r"amp\.shutdown was called inside.*after the"):
        amp.shutdown()
    with (
        AROUND[around](level),
        pytest.raises(RuntimeError, match=r"amp\.initialize was called inside.*after the"),
    ):
        make("O2")
    model(batch())  # all is as it was
    assert model.seen == (LOW[level], LOW[level])
    with amp.disable_casts():
        amp.shutdown()
    assert (torch.is_autocast_enabled(DEVICE.type), torch.is_autocast_cache_enabled()) == before
    with AROUND[around](level):
        amp.shutdown()
    make(level)


# --------------------------------------------------------------------------------------------------------- other levels


def warnings_of(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):  # torch's, of two dtypes
            act()
    return [str(w.message) for w in caught if "torch.autocast" in str(w.message)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_levels_that_do_not_cast_by_themselves_warn_once_of_a_region_around(level):
    dtype = OTHER["O4" if level in ("O4", "O5") else "O1"]

    def act():
        with region(dtype):
            model(batch())

    model, *_ = make(level)
    with torch.no_grad():
        model(batch())  # as a framework does that shows a batch beforehand
    found = warnings_of(act)
    assert len(found) == (level not in LOW)
    computes_in = {"O0": FLOAT, "O5": BF16}.get(level, HALF)
    for text in found:
        for part in (level, str(computes_in), f"torch.autocast({DEVICE.type!r}", str(dtype)):
            assert part in text
    assert warnings_of(act) == []


def test_a_level_of_another_session_is_no_region():
    model, *_ = make("O2")
    make("O1")
    assert warnings_of(lambda: model(batch())) == []
    assert model.seen == (HALF, HALF)
