# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights that a script writes between steps are those that are trained, whichever of a pair it writes to.

Apex makes masters at the first ``scale_loss``, from what the model holds then, and overwrites later writes.
"""

import copy
import sys
import warnings

import pytest
import torch
from devices import DEVICE
from small_programs import WITH_MASTERS, Weights, X, assert_values, backward, kinds, levels, start, train_step, vector
from torch import nn

from apex_npu import amp


def in_place(model):
    with torch.no_grad():
        model.w[0].fill_(5.0)


def through_data(model):
    model.w[0].data.copy_(torch.full((3,), 5.0))


def by_init(model):
    nn.init.constant_(model.w[0], 5.0)


def repointed(model):
    model.w[0].data = torch.full_like(model.w[0], 5.0)


def loaded_by_copy(model):
    backbone = {name: torch.full((3,), 5.0) for name, _ in model.named_parameters() if name == "w.0"}
    for name, value in backbone.items():
        dict(model.named_parameters())[name].data.copy_(value)


def from_a_vector(model):
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        vector[:3] = 5.0
    nn.utils.vector_to_parameters(vector, model.parameters())


WRITES = (in_place, through_data, by_init, repointed, loaded_by_copy, from_a_vector)
UNCOUNTED = (through_data, loaded_by_copy)
writes = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
with_kinds = kinds(("torch", "fused", "fuse_unscale"))


@with_kinds
@levels(WITH_MASTERS)
@writes
def test_what_is_written_before_the_first_step_is_trained(write, level, kind):
    model = Weights(1.0, 2.0)
    model, optimizer = start(model, kind=kind, level=level)
    write(model)
    train_step(model, optimizer)
    moved = torch.tensor(X)
    assert_values(model.parameters(), 5.0 - moved, 2.0 - moved)


@with_kinds
@levels(WITH_MASTERS)
@writes
def test_what_is_written_to_the_model_after_a_step_is_trained(write, level, kind):
    if write in UNCOUNTED and DEVICE.type != "cpu":
        pytest.skip("on an accelerator only writes that are counted are seen")
    exact = 2.0 + 2.0**-20
    model, optimizer = start(Weights(1.0, exact), kind=kind, level=level)
    moved = torch.tensor(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 2, 3):
            train_step(model, optimizer)
            assert_values([model.state_dict()["w.1"]], exact - count * moved)
            write(model)
            assert_values([model.state_dict()["w.0"]], 5.0)
        train_step(model, optimizer)
    state = model.state_dict()
    assert_values([state["w.0"], state["w.1"]], 5.0 - moved, exact - 4 * moved)
    assert_values([model.w[0]], 5.0 - moved)


def masters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class Net(nn.Module):
    """Weights w in a submodule, whose loss is |w|² / 2: the gradient is w."""

    def __init__(self):
        super().__init__()
        self.inner = Weights(1.0)

    def forward(self, x):
        return self.inner.w[0].float().square().sum() / 2 + 0.0 * x.float().sum()


def by_forward(model):
    return [model.inner.w[0]] if model(vector(*X)) is not None else []


def by_evaluation(model):
    with torch.no_grad():
        return by_forward(model.eval())


def by_submodule(model):
    return [model.inner.w[0]] if model.inner(vector(*X)) is not None else []


def by_state_dict(model):
    return [model.state_dict()["inner.w.0"], model.inner.w[0]]


@pytest.mark.pairwise
@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("look", [by_forward, by_evaluation, by_submodule, by_state_dict], ids=lambda f: f.__name__)
def test_what_is_written_to_masters_reaches_the_model(look, steps, level, kind):
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    for _ in range(steps):
        train_step(model, optimizer)
    with torch.no_grad():
        for master in masters_of(optimizer):
            master.fill_(0.25)
    for found in look(model):
        assert_values([found], 0.25)
    train_step(model.train(), optimizer)
    assert_values([model.inner.w[0], *masters_of(optimizer)], 0.125, 0.125)


@with_kinds
@levels(WITH_MASTERS)
def test_sharpness_aware_steps_by_hand_are_those_of_torch(level, kind):
    """A step's gradient is that of perturbed weights, as in https://github.com/davda54/sam."""
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    w = torch.ones(3)
    for radius in (0.25, -0.125, 0.5):
        backward(model(vector(*X)), optimizer)
        kept = [master.detach().clone() for master in masters_of(optimizer)]
        with torch.no_grad():
            for master in masters_of(optimizer):
                master.add_(radius)
        optimizer.zero_grad()
        backward(model(vector(*X)), optimizer)
        with torch.no_grad():
            for master, value in zip(masters_of(optimizer), kept, strict=True):
                master.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        w -= 0.5 * (w + radius)
        assert_values([*masters_of(optimizer), model.inner.w[0]], w, w)


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("replaced", [False, True])
def test_masters_written_uncounted_are_trained_and_named(replaced, level, kind):
    """As by Lookahead where it writes .data; another tensor for a master's is another address."""
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    train_step(model, optimizer)
    for master in masters_of(optimizer):
        if replaced:
            master.data = torch.full_like(master, 0.25)
        else:
            master.data.fill_(0.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_step(model, optimizer)
    # Without a count, the gradient is that of the 0.5 that the model had.
    expected = 0.25 - 0.5 * (0.25 if replaced else 0.5)
    assert_values([*masters_of(optimizer), model.inner.w[0]], expected, expected)
    named = ["not count (.data," in str(warning.message) for warning in caught]
    assert named == ([] if replaced or DEVICE.type != "cpu" else [True])


@with_kinds
@levels(WITH_MASTERS)
def test_masters_written_between_backward_and_step_are_trained(level, kind):
    """As by decoupled weight decay by hand; nothing is to be said of it."""
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = 1.0
        for _ in range(3):
            backward(model(vector(*X)), optimizer)
            with torch.no_grad():
                for master in masters_of(optimizer):
                    master.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            w = 0.5 * w - 0.5 * w
            assert_values([*masters_of(optimizer), model.inner.w[0]], w, w)
            with torch.no_grad():
                for master in masters_of(optimizer):
                    master.add_(1.0)
            w += 1.0


@with_kinds
@levels(WITH_MASTERS)
def test_where_both_are_written_the_model_counts_and_it_is_said(level, kind):
    model, optimizer = start(Weights(1.0, 2.0), kind=kind, level=level)
    train_step(model, optimizer)
    in_place(model)
    with torch.no_grad():
        for master in masters_of(optimizer):
            master.fill_(7.0)
    with pytest.warns(RuntimeWarning, match="have been written differently since the last step"):
        train_step(model, optimizer)
    assert_values(model.parameters(), 5.0 - torch.tensor(X), 7.0 - torch.tensor(X))


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("how", ["another address", "through .data"])
@pytest.mark.parametrize("steps", [0, 1])
def test_masters_that_are_written_before_all_weights_are_moved_are_trained(steps, how, level, kind):
    """As ``p.data = p.data.clone()`` moves a parameter: what has its values only has not been written."""
    if DEVICE.type != "cpu":
        pytest.skip("on an accelerator a parameter that has been moved counts as written")
    model, optimizer = start(Weights(1.0, 2.0), kind=kind, level=level)
    for _ in range(steps):
        train_step(model, optimizer)
    master = masters_of(optimizer)[0]
    if how == "another address":
        master.data = torch.full_like(master, 5.0)
    else:
        master.data.fill_(5.0)
    for p in (*model.parameters(), *masters_of(optimizer)):
        p.data = p.data.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, optimizer)
    moved = torch.tensor(X)
    assert_values(model.parameters(), 5.0 - moved, 2.0 - (steps + 1) * moved)


@with_kinds
@levels(WITH_MASTERS)
def test_weights_that_are_swapped_in_for_an_evaluation_cost_no_precision(level, kind):
    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(exact), kind=kind, level=level, lr=0.0)
    train_step(model, optimizer)
    with torch.no_grad():
        kept = model.w[0].clone()
        model.w[0].fill_(5.0)
        assert model(vector(1.0, 0.0, 0.0)) == 5.0
        assert_values([model.state_dict()["w.0"]], 5.0)
        model.w[0].copy_(kept)
        model(vector(*X))
    assert_values([model.state_dict()["w.0"]], exact)
    train_step(model, optimizer)
    assert_values([model.state_dict()["w.0"]], exact)


@with_kinds
@levels(WITH_MASTERS)
def test_an_error_after_the_update_leaves_the_model_with_its_masters(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    train_step(model, optimizer)

    def fail(*_):
        raise ValueError("in a hook")

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(ValueError, match="in a hook"):
        train_step(model, optimizer)
    expected = 1.0 - 2 * torch.tensor(X)
    assert_values([*masters_of(optimizer), model.w[0], model.state_dict()["w.0"]], *[expected] * 3)
    handle.remove()
    optimizer.zero_grad()
    train_step(model, optimizer)
    assert_values([model.w[0]], 1.0 - 3 * torch.tensor(X))


@with_kinds
@levels(WITH_MASTERS)
def test_autograd_notices_that_a_step_has_changed_the_weights(level, kind):
    model, optimizer = start(Weights(1.0), kind=kind, level=level)
    x = vector(*X).requires_grad_()  # whose gradient is the weight
    loss = model(x)
    train_step(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = model(x)
    train_step(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@with_kinds
@levels(WITH_MASTERS)
def test_copies_have_what_was_written_to_masters(level, kind):
    model, optimizer = start(Net(), kind=kind, level=level, lr=0.5)
    train_step(model, optimizer)
    with torch.no_grad():
        for master in masters_of(optimizer):
            master.fill_(0.25)
    twin, other = copy.deepcopy((model, optimizer))
    assert_values([copy.deepcopy(model).inner.w[0], twin.inner.w[0], *masters_of(other)], 0.25, 0.25, 0.25)
    train_step(twin, other)
    assert_values([twin.inner.w[0], model.inner.w[0]], 0.125, 0.25)
    with torch.no_grad():
        twin.inner.w[0].fill_(0.5)
    train_step(twin, other)
    assert_values([twin.inner.w[0], *masters_of(other)], 0.25, 0.25)


@levels(("O0", "O1", "O4"))
@writes
def test_without_masters_what_is_written_is_trained(write, level):
    model = Weights(1.0, 2.0)
    model, optimizer = start(model, level=level)
    write(model)
    train_step(model, optimizer)
    moved = torch.tensor(X)
    assert_values(model.parameters(), 5.0 - moved, 2.0 - moved)


@levels(WITH_MASTERS)
def test_a_weight_that_nothing_was_written_to_keeps_what_casting_would_lose(level):
    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(exact), level=level, lr=0.0)
    train_step(model, optimizer)
    assert_values([model.state_dict()["w.0"]], exact)


@levels(WITH_MASTERS)
def test_weights_beside_the_one_that_is_written_keep_their_precision(level):
    exact = 1.0 + 2.0**-20
    model, optimizer = start(Weights(1.0, exact), level=level, lr=0.0)
    in_place(model)
    train_step(model, optimizer)
    assert_values([model.state_dict()[name] for name in ("w.0", "w.1")], 5.0, exact)


@levels(WITH_MASTERS)
def test_what_is_loaded_before_the_first_step_is_trained(level):
    model, optimizer = start(Weights(1.0), level=level)
    model.load_state_dict({"w.0": torch.full((3,), 5.0)})
    train_step(model, optimizer)
    assert_values(model.parameters(), 5.0 - torch.tensor(X))


def test_a_copy_to_the_model_that_fails_half_way_is_made_by_another_step(monkeypatch):
    """What it has written is not taken for a script's: masters keep their update."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(DEVICE)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O2", loss_scale=1.0, verbosity=0
    )
    for step in range(2):
        with amp.scale_loss(model(torch.ones(2, 4, device=DEVICE)).float().sum(), optimizer) as scaled:
            scaled.backward()
        wanted = [p.detach() - 0.5 * p.grad for p in amp.master_params(optimizer)]
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()

    def fail(copies, masters, model_params, skipped=None):
        """As of a launch that fails: autograd counts the write, and the values are those of before."""
        with torch.no_grad():
            model_params[0].mul_(1.0)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["apex_npu.amp.master_params"], "copy_rounded", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    for master, param, value in zip(amp.master_params(optimizer), model.parameters(), wanted, strict=True):
        assert torch.equal(master, value)
        assert torch.equal(param, value.half())


@with_kinds
@levels(WITH_MASTERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_weights_that_are_given_the_same_memory_are_named(steps, level, kind):
    """Masters do not follow that: in plain torch both gradients would move the one value."""
    model, optimizer = start(Weights(1.0, 2.0), kind=kind, level=level)
    for _ in range(steps):
        train_step(model, optimizer)
    model.w[1].data = model.w[0].data
    with pytest.warns(RuntimeWarning, match="have been given the same memory"):
        train_step(model, optimizer)
