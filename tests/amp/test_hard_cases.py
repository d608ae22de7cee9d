# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders of calls that are legal, or refused, and once went wrong."""

import contextlib
import itertools
import math
import re
import warnings
import weakref

import pytest
import torch
from devices import DEVICE, are_dropped, needs, require
from small_programs import LEVELS, WITH_MASTERS, backward, initialize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host


def make(level, maker=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = maker(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, **{"opt_level": level, "loss_scale": 4.0, "verbosity": 0, **options})


def block(model, optimizer, **options):
    backward(model(torch.ones(1, 3)).sum(), optimizer, **options)


def grads(optimizer):
    return [None if p.grad is None else p.grad.flatten().tolist() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nested_blocks_are_refused(level):
    model, optimizer = make(level)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="must not be nested"), amp.scale_loss(loss, optimizer):
        block(model, optimizer)
    block(model, optimizer)
    assert grads(optimizer) == [[1, 1, 1]]


@pytest.mark.parametrize("maker", [torch.optim.SGD, optimizers.NpuFusedSGD])
def test_a_parameter_in_two_optimizers_is_unscaled_once(maker):
    model, own = nn.Linear(3, 1, bias=False), nn.Parameter(torch.ones(2))
    pair = [maker(model.parameters(), lr=0.1), maker([*model.parameters(), own], lr=0.1)]
    model, pair = initialize(model, pair, "O1", loss_scale=8.0)
    for expected in (1.0, 2.0):
        backward(model(torch.ones(1, 3)).sum() + own.sum(), pair)
        assert model.weight.grad.flatten().tolist() == [expected] * 3
        assert own.grad.tolist() == [expected] * 2


def test_a_gradient_that_cannot_be_scaled_up_changes_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    options = {"opt_level": "O1", "loss_scale": 4.0, "combine_grad": True, "verbosity": 0}
    _, optimizer = amp.initialize(nn.Identity(), optimizer, **options)
    params[0].grad = torch.ones(3)
    params[1].grad = torch.ones(3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        backward(torch.ones((), requires_grad=True), optimizer)
    assert params[0].grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("maker", [torch.optim.SGD, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_a_backward_before_a_block_that_fails_are_kept(level, maker):
    model, optimizer = make(level, maker)
    model(torch.ones(1, 3)).float().sum().backward()
    loss = model(torch.ones(1, 3)).sum()
    with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss, optimizer) as scaled_loss:
        if level in WITH_MASTERS:
            scaled_loss.backward()
        raise ZeroDivisionError
    assert grads(optimizer) == [[1, 1, 1]]
    block(model, optimizer)
    assert grads(optimizer) == [[2, 2, 2]]


@pytest.mark.parametrize("options", [{}, {"fuse_unscale": True, "loss_scale": "dynamic"}], ids=["", "fuse_unscale"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_models_are_not_kept_alive(level, options):
    alive = []
    for _ in range(3):
        model, optimizer = make(level, optimizers.NpuFusedSGD if options else torch.optim.SGD, **options)
        block(model, optimizer)
        optimizer.step()
        alive.append(weakref.ref(model))
        del model, optimizer
    assert are_dropped(*alive)
    make(level)
    assert len(amp.session.current().models) == 1


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode])
def test_modes_whose_tensors_cannot_be_trained(mode, level, inside):
    with mode():
        model = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match=r"called under (FakeTensorMode|torch.inf).*; call it outside"):
            amp.initialize(model if inside else [], opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"or with a model made there"):
        amp.initialize(model, opt_level=level, verbosity=0)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("fuse_unscale", [False, True])
@pytest.mark.parametrize("maker", [torch.optim.SGD, optimizers.NpuFusedSGD])
def test_clipping_scaled_gradients_is_refused(maker, fuse_unscale):
    model, optimizer = make("O1", maker, fuse_unscale=fuse_unscale)
    block(model, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match=r"loss scale 4.0: .*delay_unscale=True.*; before clipping, close a block"):
        optimizer.clip_optimizer_grad_norm_fused(1.0)
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match=r"loss scale 4.0: clipping was called inside scale_loss"):
            optimizer.clip_optimizer_grad_norm_fused(1.0)
    assert optimizer.clip_optimizer_grad_norm_fused(100.0).item() == pytest.approx(math.sqrt(12))


def test_assigning_state_dicts_over_masters_is_refused():
    model, _ = make("O2")
    with pytest.raises(RuntimeError, match=r"assign=True.* would replace weight, whose float32 value"):
        model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.parametrize(
    ("level", "maker", "combine_grad"),
    [
        pytest.param(*case, marks=[] if case == ("O2", optimizers.NpuFusedAdam, True) else pytest.mark.sweep)
        for case in itertools.product(("O0", "O1", "O2"), (torch.optim.Adam, optimizers.NpuFusedAdam), (None, True))
    ],
)
def test_a_compiled_training_step(level, maker, combine_grad):
    """torch.compile around everything: what touches flat buffers runs as it is."""
    courses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = maker(model.parameters(), lr=0.05)
        model, optimizer = initialize(model, optimizer, level, loss_scale=8.0, combine_grad=combine_grad)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            backward(loss, optimizer)
            optimizer.step()
            return loss.detach()

        run = torch.compile(step, backend="aot_eager") if compiled else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo reports its graph breaks
            courses.append([run(torch.full((5, 4), 0.1 * i)).item() for i in range(5)])
        amp.shutdown()
    assert courses[1] == pytest.approx(courses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.LazyLinear(3), "weight has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "meta device; call model.to_empty"),
    ],
    ids=["lazy", "meta"],
)
def test_models_without_values(model, says):
    with pytest.raises(RuntimeError, match=says):
        amp.initialize(model, opt_level="O2", verbosity=0)


class PartlyScripted(nn.Module):
    """A module of ``torch.jit`` among others."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), inner, nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return torch.jit.script(module)


def trained_gradients(model, level):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, level, loss_scale=8.0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.linspace(-1, 1, 12, device=DEVICE).view(3, 4)).float().square().mean(), optimizer)
        optimizer.step()
    found = [p.grad for p in model.parameters()]
    amp.shutdown()
    return found


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1"])  # torch.jit differentiates for one dtype of autocast in a process
def test_scripted_modules_train_like_others(level, whole):
    if level == "O1" and DEVICE.type == "npu":
        pytest.skip("torch.jit does not differentiate scripted code under the autocast of an NPU")

    def made(script):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        model = PartlyScripted(inner if whole else script(inner)).to(DEVICE)
        return script(model) if whole else model

    expected, found = trained_gradients(made(lambda module: module), level), trained_gradients(made(scripted), level)
    assert len(found) == 6
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-2 if level != "O0" else 1e-5, atol=1e-4)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_scripted_weights_are_not_cast(level):
    model = PartlyScripted(scripted(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"inner\.0 is a .* of torch\.jit: opt_level O\d casts .* or use O1 or O4"):
        initialize(model, optimizer, level)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(grad.isfinite().all() for grad in trained_gradients(model, "O0"))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_scripted_modules_without_weights(level):
    model = PartlyScripted(scripted(nn.ReLU())).to(DEVICE)
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in trained_gradients(model, level))
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


USES = {
    "clip": lambda model, optimizer: optimizer.clip_optimizer_grad_norm_fused(0.01),
    "clip by torch": lambda model, optimizer: nn.utils.clip_grad_value_(amp.master_params(optimizer), 10.0),
    "clip the model's": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "clip some values": lambda model, optimizer: nn.utils.clip_grad_value_([model.weight], 0.001),
    "combined": lambda model, optimizer: [
        flat.mul_(0.5)
        for flat, mask in zip(
            optimizer.get_optimizer_combined_grads(), optimizer.get_optimizer_combined_grad_masks(), strict=True
        )
        if mask.any()
    ],
    "buffers": lambda model, optimizer: (
        optimizer.get_optimizer_combined_params(),
        optimizer.get_model_combined_params(),
    ),
    "outcome": lambda model, optimizer: (amp.will_skip(optimizer), amp.last_step(optimizer), amp.state_dict()),
}


def uses():
    """Each use with either level and either way of unscaling; half of their product are sweeps."""
    for i, (use, level, fuse) in enumerate(itertools.product(USES, ("O0", "O2"), (True, False))):
        slow = [pytest.mark.slow] if i else []
        is_sweep = (i // 4 + (level == "O2") + fuse) % 2 == 0
        yield pytest.param(use, level, fuse, marks=[pytest.mark.sweep] if is_sweep else slow)


@pytest.mark.parametrize(("use", "level", "fuse_unscale"), list(uses()))
def test_what_a_compiled_training_step_may_call(use, level, fuse_unscale):
    found = []
    for compiled in (False, True):
        model, optimizer = make(level, optimizers.NpuFusedSGD, fuse_unscale=fuse_unscale)

        def step(x):
            optimizer.zero_grad()  # noqa: B023
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:  # noqa: B023
                scaled_loss.backward()
            USES[use](model, optimizer)  # noqa: B023
            optimizer.step()  # noqa: B023

        run = torch.compile(step, backend="eager") if compiled else step
        for i in range(3):
            run(torch.full((2, 3), 0.25 * i))
        found.append(model.weight.detach().clone())
        torch._dynamo.reset()
        amp.shutdown()
    assert torch.equal(*found)


class Spectral(torch.nn.Module):
    """A convolution in the frequency domain, as Fourier neural operators have it."""

    def __init__(self):
        super().__init__()
        self.lift = torch.nn.Linear(4, 8)
        self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.lift(x).float()) * self.weight)


@needs("complex_norm")
@pytest.mark.parametrize("options", [{"loss_scale": 128.0}, {"loss_scale": "dynamic"}])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_complex_parameters(options, make):
    torch.manual_seed(0)
    ours, theirs = Spectral().to(DEVICE), Spectral().to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4).to(DEVICE)
    plain = make(theirs.parameters(), lr=0.1)
    ours, optimizer = amp.initialize(ours, make(ours.parameters(), lr=0.1), opt_level="O0", verbosity=0, **options)
    for factor in (1.0, math.inf if options["loss_scale"] == "dynamic" else 1.0, 1.0):
        optimizer.zero_grad()
        backward(ours(x).square().mean() * factor, optimizer)
        if factor == math.inf:
            assert set(amp.debug.bad_gradients(optimizer)) >= {"weight"}
        optimizer.step()
        assert amp.last_step(optimizer).skipped is (factor == math.inf)
        if factor == 1.0:
            plain.zero_grad()
            theirs(x).square().mean().backward()
            plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)  # scales are powers of two


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def functional(model, x):
    values = {name: t.detach().float() for name, t in model.named_parameters()}
    return torch.func.functional_call(model, values, x)


def adapted(model, x):
    model[0] = Adapter(model[0]).to(x.device)
    return model(x)


CONVERSIONS = {
    "float": lambda model, x: model.float()(x),
    "double": lambda model, x: model.double()(x),
    "functional_call": functional,
    "adapter": adapted,
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_model_that_is_not_in_the_dtype_it_was_cast_to_is_named(conversion, level):
    if conversion == "double":
        require("float64")
    if level == "O4":
        require("autocast_to_bfloat16")
    if level in ("O2", "O3", "O5"):
        require("mixed_operands")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.ones(2, 4, device=DEVICE)
    if conversion == "float" and level in ("O2", "O5"):  # float32 data of a parameter is its value
        dtype = model[0].weight.dtype
        assert CONVERSIONS[conversion](model, x).isfinite().all()
        assert model[0].weight.dtype == dtype
    elif level in ("O2", "O3", "O5") or (level == "O0" and conversion == "double"):
        with pytest.raises(RuntimeError, match=r"amp.initialize has cast to .* have another dtype. They may"):
            CONVERSIONS[conversion](model, x)
    elif level == "O0" or conversion != "double":
        assert CONVERSIONS[conversion](model, x).isfinite().all()


class Recurrent(nn.Module):
    """It makes its initial state itself, in the dtype of its input or as a beginner would."""

    def __init__(self, cls, fits):
        super().__init__()
        self.rnn, self.fits = cls(4, 4, batch_first=True), fits

    def forward(self, x):
        state = torch.zeros(1, len(x), 4, device=x.device, dtype=x.dtype if self.fits else None)
        return self.rnn(x, (state, state) if isinstance(self.rnn, nn.LSTM) else state)[0]


class Masked(nn.Module):
    def __init__(self, layer, fits):
        super().__init__()
        self.layer, self.fits = layer, fits

    def forward(self, x):
        mask = torch.ones(x.shape, device=x.device, dtype=x.dtype if self.fits else None)
        return self.layer(x * mask)


OWN_TENSORS = {
    "lstm": lambda fits: Recurrent(nn.LSTM, fits),
    "gru": lambda fits: Recurrent(nn.GRU, fits),
    "linear": lambda fits: Masked(nn.Linear(4, 4), fits),
    "conv": lambda fits: Masked(nn.Conv1d(3, 2, 1), fits),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("model", OWN_TENSORS)
def test_a_float32_tensor_that_a_model_makes_is_explained_where_a_layer_refuses_it(model, level):
    require("mixed_operands")
    if level == "O4":
        require("autocast_to_bfloat16")
    x = torch.ones(2, 3, 4, device=DEVICE)
    proposed = "O1" if level in ("O2", "O3") else "O4"
    beginner = amp.initialize(OWN_TENSORS[model](False).to(DEVICE), opt_level=level, verbosity=0)
    if level in ("O1", "O4"):
        assert beginner(x).isfinite().all()
    else:
        with pytest.raises(
            RuntimeError, match=rf"\nThe model has been cast to .*dtype=x.dtype.*initialize at '{proposed}'"
        ):
            beginner(x)
        assert amp.initialize(OWN_TENSORS[model](True).to(DEVICE), opt_level=level, verbosity=0)(x).isfinite().all()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_error_about_integers_is_the_models_own(level):
    class Embedding(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, x):
            return self.table(x)

    model = amp.initialize(Embedding().to(DEVICE), opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, device=DEVICE))
    assert "has been cast to" not in str(caught.value)


def half(model):
    return model.half()


def moved(model):
    return model.to(next(model.parameters()).device)


def there_and_back(model):
    return model.float().to(torch.float16)


SWAPPING = [moved, half, nn.Module.bfloat16, nn.Module.float, there_and_back]


def trained_after(convert, level, cls, *, swap):
    """What comes of a model that ``convert`` has converted between two steps: its state dict, or the error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(DEVICE)
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = amp.initialize(model, cls(trained, lr=0.5, momentum=0.5), opt_level=level, verbosity=0)
    x = torch.arange(12.0, device=DEVICE).view(3, 4) / 8
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for converted in (False, True, False):
            optimizer.zero_grad()  # torch swaps no parameter of 16 bits that has a float32 gradient
            if converted:
                convert(model)
            backward(model(x).float().square().mean(), optimizer)
            optimizer.step()
        found = {name: (value.dtype, value.flatten().tolist()) for name, value in model.state_dict().items()}
        model.load_state_dict(model.state_dict())
    except (RuntimeError, NotImplementedError) as error:
        found = re.sub(r"\S*-\d+:\d+:\d+", "", str(error))  # torch_npu adds the time
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        amp.shutdown()
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("cls", [torch.optim.SGD, optimizers.NpuFusedSGD])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("convert", SWAPPING, ids=lambda convert: convert.__name__)
def test_parameters_that_conversions_swap(convert, level, cls):
    """As where ``Module.to`` assigns ``param.data``."""
    if level == "O4":
        require("autocast_to_bfloat16")
    if (level == "O3" and convert is not moved) or (level == "O5" and convert is there_and_back):
        require("mixed_operands")
    found, wanted = (trained_after(convert, level, cls, swap=swap) for swap in (True, False))
    if not isinstance(wanted, str):
        # A swap counts as a write to a parameter of at most 1, after which remainders are zero.
        half_ulp = {"O2": 2.0**-12, "O5": 2.0**-9}.get(level, 0.0) if cls is optimizers.NpuFusedSGD else 0.0
        wanted = {
            name: (dtype, pytest.approx(value, rel=0.0, abs=2 * half_ulp)) for name, (dtype, value) in wanted.items()
        }
    assert found == wanted
    assert isinstance(found, str) <= (convert is not moved)
