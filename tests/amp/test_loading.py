# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``load_state_dict`` gives masters the values that the model gets, however it gets them.

What is saved is right on any device.
"""

import copy
import gc

import pytest
import torch
from devices import DEVICE, needs
from small_programs import LEVELS, Weights, assert_values, backward, levels, start, train_step
from torch import nn

from apex_npu import amp, optimizers


class Single(nn.Module):
    """One parameter of any shape, with gradient 1."""

    def __init__(self, shape=(3,)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, device=DEVICE))

    def forward(self, x):
        return (self.weight * x.reshape(-1)[0]).sum()


class LoadsByItself(Single):
    """Saved under another name, as a logarithm."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "log2"] = self.weight.detach().float().log2()

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "log2"].exp2())


class LoadsUncounted(Single):
    """Writes to its parameter in a way that autograd does not count."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.weight.data.copy_(state_dict[prefix + "kept"])


def load_and_train(model, state, level, prepare=lambda model: None):
    """One step of 1 from what was loaded."""
    model, optimizer = start(model, level=level)
    prepare(model)
    model.load_state_dict(state)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    return model, optimizer


def double_on_load(model):
    def double(module, state_dict, prefix, *_):
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2

    model.register_load_state_dict_pre_hook(double)


@pytest.mark.parametrize("before", [False, True])
@levels(LEVELS)
def test_a_hook_that_changes_the_values(level, before):
    """Registered before ``initialize``, or after it."""
    model = Single()
    if before:
        double_on_load(model)
    state = {"weight": torch.full((3,), 4.0)}
    model, optimizer = load_and_train(model, state, level, lambda model: before or double_on_load(model))
    assert_values(model.parameters(), 7.0)
    assert_values(amp.master_params(optimizer), 7.0)


@pytest.mark.parametrize("shape", [(), (1,)])
@levels(LEVELS)
def test_a_parameter_without_dims(level, shape):
    _, optimizer = load_and_train(Single(()), {"weight": torch.full(shape, 5.0)}, level)
    assert_values(amp.master_params(optimizer), 4.0)


@levels(LEVELS)
def test_a_class_that_loads_by_itself(level):
    model, optimizer = load_and_train(LoadsByItself(), {"log2": torch.full((3,), 3.0)}, level)
    assert_values(amp.master_params(optimizer), 7.0)
    model.load_state_dict({"log2": torch.full((3,), 5.0)})  # in the middle of a training
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values(amp.master_params(optimizer), 31.0)


@levels(LEVELS)
def test_the_state_of_a_model_that_is_moved_to_the_host_is_saved(level, tmp_path):
    exact = 1.0 + 5 * 2.0**-20
    model, optimizer = start(Weights(exact), level=level, lr=2.0**-20)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    torch.save(model.cpu().state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert {t.device.type for t in saved.values()} == {"cpu"}
    assert_values(saved.values(), exact - 2.0**-20)


@levels(LEVELS)
def test_what_a_module_loads_uncounted_after_steps_counts(level):
    model, optimizer = start(LoadsUncounted(), level=level)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    model.load_state_dict({"kept": torch.full((3,), 5.0)}, strict=False)
    train_step(model, optimizer, (1.0, 1.0, 1.0))
    assert_values([*model.parameters(), *amp.master_params(optimizer)], 4.0, 4.0)


# Writes to tensors of a state dict

CASTS = [
    *[(level, {}) for level in ("O0", "O1", "O2", "O3", "O5")],
    ("O5", {"store_param_remainders": True}),
    ("O5", {"master_weights": False}),
]
# Weights that have no master, and levels without float32 weights, have what is written rounded.
ROUNDS = {"O3": 2**-10, "O5": 2**-8}


class Partly(nn.Module):
    """A frozen layer, a trained one, one without dimensions, and a buffer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.factor = nn.Parameter(torch.tensor(1.37))
        self.register_buffer("table", torch.rand(4))

    def forward(self, x):
        return self.head(self.base(x) + self.table) * self.factor


def partly(level, options):
    """The model under amp, its optimizer, and the same model in plain torch."""
    torch.manual_seed(0)
    model = Partly().to(DEVICE)
    plain = copy.deepcopy(model)
    optimizer = optimizers.NpuFusedSGD([p for p in model.parameters() if p.requires_grad], lr=0.125)
    return *amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0, **options), plain


def one_step(model, optimizer):
    optimizer.zero_grad()
    backward(model(torch.ones(2, 6, device=DEVICE)).float().sum(), optimizer)
    optimizer.step()


def assert_taken(model, plain, level, options):
    """The model and its state dict have the values of ``plain``, the latter exactly where there are masters."""
    has_float32 = level != "O3" and options.get("master_weights", True)
    shown = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        expected = plain.state_dict()[name]
        rounds = 0 if has_float32 and tensor.dtype == torch.float32 else ROUNDS.get(level, 2**-11)
        torch.testing.assert_close(tensor.float(), expected, rtol=rounds, atol=1e-7)
        torch.testing.assert_close(shown[name].float(), expected, rtol=0 if has_float32 else rounds, atol=0)


def load_in_part(model):
    own = model.state_dict()
    for name in ("base.weight", "head.bias", "factor"):
        own[name].copy_(torch.full_like(own[name], 1 / 3))


def write_elements(model):
    own = model.base.state_dict(prefix="base.")
    own["base.weight"][1, 2:] = 1 / 3
    own["base.weight"].view(-1)[:2].mul_(0.7)
    with torch.no_grad():
        own.update(model.state_dict(keep_vars=True))
        own["head.weight"].clamp_(-0.1, 0.1)
        own["table"] += 1 / 3


def write_lists(model):
    with torch.inference_mode():
        listed = list(model.state_dict().values())
        torch._foreach_mul_(listed, 0.9)
        torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)(listed, [torch.ones_like(value) for value in listed], 1)


def write_several(model):
    first, second = model.state_dict(), model.state_dict()
    with torch.no_grad():
        first["base.weight"].fill_(1 / 3)
        second["base.weight"][0] = 2 / 3
        model(torch.ones(2, 6, device=DEVICE))
        first["head.bias"][0] = 1 / 3
        third = model.state_dict()
        second["head.bias"][1] = 2 / 3
        third["base.weight"][1] = 1 / 7


WRITES = [load_in_part, write_elements, pytest.param(write_lists, marks=needs("counted_lists")), write_several]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("level", "options"), CASTS)
def test_writes_to_a_state_dict_are_taken(level, options, steps, write):
    model, optimizer, plain = partly(level, options)
    for _ in range(steps):
        one_step(model, optimizer)
    plain.load_state_dict(model.state_dict())
    write(model)
    write(plain)
    with torch.no_grad():
        model(torch.ones(2, 6, device=DEVICE))
    assert_taken(model, plain, level, options)
    assert_taken(copy.deepcopy((model, optimizer))[0], plain, level, options)
    one_step(model, optimizer)


@pytest.mark.parametrize("look", ["step", "copy", "state_dict", "load_state_dict", "shutdown"])
@pytest.mark.parametrize(("level", "options"), CASTS)
def test_writes_to_a_state_dict_are_taken_wherever_amp_looks(level, options, look):
    model, optimizer, plain = partly(level, options)
    one_step(model, optimizer)
    optimizer.zero_grad()
    backward(0.0 * model(torch.ones(2, 6, device=DEVICE)).float().sum(), optimizer)
    plain.load_state_dict(model.state_dict())
    load_in_part(model)
    load_in_part(plain)
    if look == "step":
        optimizer.step()
    elif look == "copy":
        clean = copy.deepcopy(model)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(states(clean), states(model), strict=True))
    elif look == "load_state_dict":
        model.load_state_dict({"table": torch.zeros(4)}, strict=False)
        plain.table.zero_()
    elif look == "shutdown":
        amp.shutdown()
    assert look != "shutdown" or all(p.dtype == torch.float32 for p in model.parameters())
    model.state_dict()
    assert_taken(model, plain, level, options)


def states(model):
    return list(model.state_dict().values())


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_what_only_reads_a_state_dict_writes_nothing(level, tmp_path):
    model, optimizer, plain = partly(level, {})
    one_step(model, optimizer)
    tensors = [*model.parameters(), *model.buffers()]
    before = [t._version for t in tensors]
    own = model.state_dict()
    torch.save(own, tmp_path / "own.pth")
    plain.load_state_dict(copy.deepcopy(own), strict=True)
    torch.func.functional_call(plain, {name: value.float() for name, value in own.items()}, torch.ones(2, 6).to(DEVICE))
    with torch.no_grad():
        model(torch.ones(2, 6, device=DEVICE))
    copy.deepcopy(own)["base.weight"].zero_()
    model.state_dict()
    assert [t._version for t in tensors] == before
    assert not (plain.base.weight == 0).any()


@pytest.mark.parametrize(("level", "options"), [("O2", {}), ("O3", {}), ("O5", {"store_param_remainders": True})])
def test_writes_to_a_state_dict_that_the_model_has_left_behind_are_warned_of(level, options):
    model, optimizer, _ = partly(level, options)
    own = model.state_dict()
    one_step(model, optimizer)
    with torch.no_grad():
        model.base.weight.fill_(2.0)
        own["base.weight"][0, 0] = 7.0
        own["head.weight"][0, 0] = 7.0
    expected = model.head.weight.detach().clone()
    with pytest.warns(
        RuntimeWarning, match=r"model\.state_dict\(\) have been written after .* Call model\.state_dict\(\) again"
    ):
        model(torch.ones(2, 6, device=DEVICE))
    assert (model.base.weight == 2.0).all()
    assert torch.equal(model.head.weight, expected)
    own = model.state_dict()
    own["base.weight"][0, 0] = 7.0
    assert model.state_dict()["base.weight"].flatten()[:2].tolist() == [7.0, 2.0]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_copies_in_a_state_dict_are_freed_with_it(level):
    model, optimizer, _ = partly(level, {})
    one_step(model, optimizer)

    def tensors():
        gc.collect()
        return {id(held): held for held in gc.get_objects() if isinstance(held, torch.Tensor)}

    before = tensors()  # held until the end: what other tests have left is not freed in between
    own = model.state_dict()
    assert tensors().keys() > before.keys()
    del own
    assert tensors().keys() == before.keys()


@pytest.mark.parametrize(("level", "options"), CASTS)
def test_an_average_that_is_swapped_in_is_taken_and_taken_out(level, options):
    model, optimizer, _ = partly(level, options)
    average = optimizers.FusedEMA(model, decay=0.5)
    one_step(model, optimizer)
    average.update()
    before = copy.deepcopy(model.state_dict())
    with average.swapped(), torch.no_grad():
        model(torch.ones(2, 6, device=DEVICE))
        rounded = model.head.weight.dtype
        assert torch.equal(model.head.weight, average.state_dict()["averages"]["head.weight"].to(rounded))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
