# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A skipped step is run again: the same gradients, the same causes as when it is watched, and nothing else changes."""

import copy
import dataclasses
import functools
import io
import itertools
import math
import pickle
import random
import threading
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from debug import healthy, planted, planted_more
from debug.test_explain import tables
from debug.test_find_overflow import CASES, saturating_chip  # noqa: F401
from debug.test_watching import hooks_of, hooks_of_torch, iterate, nothing_changes, set_up
from devices import DEVICE, are_dropped, needs
from small_programs import backward
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from apex_npu import amp, optimizers
from apex_npu.amp.session import settings

pytestmark = needs("inf")
SAME = ("its gradients are the same, bit for bit", "all of its gradients are nan, as they were")
# Their loss function overflows, which is not run again.
AFTER_THE_MODEL = {"log", "second"}
# Their gradients are finite, or they use a checkpoint that torch.autograd.grad refuses.
NOT_SKIPPED, REENTRANT = {"bias", "product"}, {"checkpoint"}


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = (*hooks_of_torch(), dict(torch_optimizer._global_optimizer_post_hooks))
    yield
    amp.debug.explain_overflows(None)
    assert (*hooks_of_torch(), dict(torch_optimizer._global_optimizer_post_hooks)) == before


def note_of(found):
    (note,) = [note for report in found.reports for note in report.notes]
    return note


@pytest.mark.parametrize(("fault", "level", "optimizer", "options"), CASES)
def test_planted(fault, level, optimizer, options):
    model, made, _ = planted.set_up(fault, level, optimizer, **options)
    with amp.debug.find_overflow(model, replay=True) as found:
        planted.iterate(fault, model, made)
    expected = fault.at(level)
    if fault.name in NOT_SKIPPED:
        assert str(found) == "no step was skipped while this was open"
    elif fault.name in REENTRANT:
        assert note_of(found).startswith("the step could not be run again: ")
    elif fault.name in AFTER_THE_MODEL:
        assert [(cause.kind, cause.phase, cause.operator) for cause in found.causes] == [
            ("unknown", "backward", "none")
        ]
        assert "the code that computes the loss" in str(found)
    else:
        # A sum over several backward passes is added up where no line of the model is.
        expected = {key: value for key, value in expected.items() if (fault.name, key) != ("sum", "line")}
        assert [{key: getattr(cause, key) for key in expected} for cause in found.causes] == [expected], str(found)
        assert found.causes[0].tensor == fault.tensor or fault.tensor is None
        assert note_of(found).endswith(SAME)


@pytest.mark.parametrize(("fault", "level", "optimizer", "options"), CASES)
def test_planted_on_a_chip_that_saturates(fault, level, optimizer, options, saturating_chip):  # noqa: F811
    model, made, _ = planted.set_up(fault, level, optimizer, **options)
    with amp.debug.find_overflow(model, replay=True) as found:
        planted.iterate(fault, model, made)
    expected = fault.at(level)
    named = [cause for cause in found.causes if cause.operator != "none"]
    # Where the loss function saturates, its gradients are finite numbers like others.
    assert named or fault.name in AFTER_THE_MODEL | NOT_SKIPPED | REENTRANT | {"sum", "product", "batch"}, str(found)
    assert [{key: getattr(cause, key) for key in expected} for cause in named] == [expected] * len(named), str(found)


class Dropped(nn.Module):
    """Draws of all generators, a buffer that each forward writes and reads, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.bn, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        random.random(), np.random.rand()
        x = torch.dropout(self.bn(self.first(x)), 0.5, True) * self.calls
        return checkpoint(lambda h: torch.dropout(self.last(h), 0.5, True), x, use_reentrant=False)

    def loss(self):
        return self(torch.randn(4, 8).to(DEVICE)).float().square().mean()


@pytest.mark.parametrize("level", ["O0", "O1", pytest.param("O2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [*healthy.MODELS, Dropped])
def test_the_gradients_are_those_of_the_skipped_step(make, level):
    # The largest scale that float32 holds: of some gradients alone.
    model, optimizer = set_up(make, level, torch.optim.SGD, dynamic_init_scale=2.0**24)
    seen = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.detach().clone()))
    iterate(model, optimizer)
    seen.clear()
    with amp.debug.find_overflow(model, replay=True) as found:
        optimizer.zero_grad()
        with amp.scale_loss(model.loss() * torch.where(torch.ones((), device=DEVICE) > 0, 1e38, 1), optimizer) as loss:
            loss.backward()
        optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert seen
    for once, again in seen.values():
        torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)
    assert note_of(found).endswith(SAME)
    assert found.parameters


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [*healthy.MODELS, Dropped])
def test_nothing_changes(make, level):
    scale = {"dynamic_init_scale": 2.0**60, "max_loss_scale": 2.0**60, "scale_backoff_factor": 2.0**-12}
    context = functools.partial(amp.debug.find_overflow, replay=True)
    seen = nothing_changes(lambda: set_up(make, level, **scale), range(12), 12, context)
    reports = [report for found in seen for report in found.reports]
    assert reports
    assert all(report.notes[-1].endswith(SAME) for report in reports)


def squares(x):
    return x * x  # fault: squares


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.fc.weight)

    def forward(self, x):
        return squares(self.fc(x))


def changed(change):
    """A model whose nth forward, those of replays included, gets ``change(n, x)``."""
    calls = itertools.count(1)  # not of the model, whose attributes are as they were in a replay

    class Changed(Squares):
        def forward(self, x):
            return super().forward(change(next(calls), x))

    return Changed


class Encoder(Squares):
    """A model of which a script calls a part."""

    def encode(self, x):
        return squares(self.fc(x))


LINE = planted.marked_lines(__file__)["squares"]


def bad_batch():
    return torch.full((2, 8), 1000.0).to(DEVICE)


def good_batch():
    return torch.ones(2, 8).to(DEVICE)


def names_the_line(found):
    return [(cause.kind, cause.phase, cause.line) for cause in found.causes] == [("overflow", "forward", LINE)]


@pytest.mark.parametrize("delay", [{}, {"delay_unscale": True}])
def test_the_micro_batch_that_has_overflowed_is_found(delay):
    model, optimizer = set_up(Squares, "O2")
    with amp.debug.find_overflow(replay=True) as found:
        for second in (good_batch(), bad_batch()):
            optimizer.zero_grad()
            for batch in (good_batch(), second):
                backward(model(batch).float().mean(), optimizer, **delay)
            backward(model(good_batch()).float().mean(), optimizer)
            optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert names_the_line(found), str(found)
    assert [bool(report.causes) for report in found.reports] == [False, True, False]
    # Without the delay each block halves the scale, and drops the gradients that have overflowed.
    assert note_of(found).startswith("run again")


def test_several_backwards_in_a_block():
    model, optimizer = set_up(Squares, "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        good, bad = model(good_batch()).float().mean(), model(bad_batch()).float().mean()
        with amp.scale_loss(good, optimizer) as scaled_loss:
            scaled_loss.backward()
            (bad * bad).backward()
        optimizer.step()
    assert names_the_line(found), str(found)
    assert note_of(found).endswith(SAME)


def test_a_graph_that_two_losses_share():
    model, optimizer = set_up(Squares, "O2", num_losses=2)
    with amp.debug.find_overflow(model, replay=True) as found:
        output = model(bad_batch())
        with amp.scale_loss(output[:, :4].float().mean(), optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        backward(output[:, 4:].float().mean(), optimizer, loss_id=1)
        optimizer.step()
    assert {(cause.kind, cause.line) for cause in found.causes} == {("overflow", LINE)}
    assert len(found.reports) == 2


def test_a_network_that_is_judged_by_another():
    torch.manual_seed(0)
    generator, judge = nn.Linear(4, 8).to(DEVICE), Squares().to(DEVICE)
    both = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (generator, judge)]
    (generator, judge), (of_generator, of_judge) = amp.initialize(
        [generator, judge], both, opt_level="O2", loss_scale="dynamic", verbosity=0, dynamic_init_scale=4.0
    )
    noise = torch.randn(2, 4).to(DEVICE)
    with amp.debug.find_overflow(replay=True) as found:
        fake = generator(noise)
        backward(judge(fake.detach()).float().mean(), of_judge)
        of_judge.step()
        of_generator.zero_grad()
        backward(judge(fake * 1e4).float().mean(), of_generator)
        of_generator.step()
    assert amp.last_step(of_judge).applied
    assert amp.last_step(of_generator).skipped
    (cause,) = found.causes
    assert (cause.kind, cause.module, cause.line) == ("overflow", "models[1]", LINE)
    # What the judge passes back to the generator is no cause of its own.
    assert note_of(found).endswith(SAME)


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    others: dict


class Structured(Squares):
    def forward(self, *, batch, gain=1.0):
        value = super().forward(batch["x"] * gain)
        return Output(value.float(), {"twice": [value.float() * 2]})


def test_keyword_arguments_and_outputs_in_containers():
    model, optimizer = set_up(Structured, "O1")
    with amp.debug.find_overflow(model, replay=True) as found:
        output = model(batch={"x": good_batch()}, gain=1000.0)
        backward(output.value.mean() + output.others["twice"][0].mean(), optimizer)
        optimizer.step()
    assert names_the_line(found), str(found)
    assert note_of(found).endswith(SAME)


def test_a_module_that_computes_the_loss():
    class Loss(nn.Module):
        def forward(self, output, target):
            return (output * 0 + target).log().mean()

    criterion = Loss()
    model, optimizer = set_up(lambda: nn.Linear(8, 1), "O2")
    with amp.debug.find_overflow(model, criterion, replay=True) as found:
        backward(criterion(model(good_batch()), torch.zeros(2, 1).to(DEVICE)), optimizer)
        optimizer.step()
    (cause,) = found.causes
    assert (cause.kind, cause.phase, cause.module, cause.operator) == ("math", "forward", "models[1]", "aten::log")


def step(model, optimizer, batch):
    optimizer.zero_grad()
    backward(model(batch).float().mean(), optimizer)
    optimizer.step()


def skipped(model, optimizer, batch):
    """One iteration that overflows."""
    step(model, optimizer, batch)
    assert amp.last_step(optimizer).skipped


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda n, x: x * (1000.0 if n == 1 else 1.0), "its gradients are finite"),
        (lambda n, x: x.mul_(1000.0), "could not be run again: tensor 0 of its arguments, of shape [2, 8]"),
        (lambda n, x: x[:n] * 1000.0, "could not be run again"),
    ],
)
def test_what_is_not_the_same_is_not_run_again(change, reason):
    model, optimizer = set_up(changed(change), "O0")
    with amp.debug.find_overflow(model, replay=True) as found:
        skipped(model, optimizer, good_batch() * 1e17)
    assert reason in note_of(found), str(found)
    assert not found.causes
    assert "no cause was found" in str(found)


def test_a_part_of_a_model_is_not_run_again():
    model, optimizer = set_up(Encoder, "O0")
    with amp.debug.find_overflow(model, replay=True) as found:
        backward(model.encode(good_batch() * 1e30).mean(), optimizer)
        optimizer.step()
    assert "no forward was kept" in note_of(found)
    assert "model(input)" in note_of(found)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_replay_runs_no_collective(tmp_path):
    def gather(n, x):
        dist.all_reduce(torch.zeros(1))
        return x

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, optimizer = set_up(changed(gather), "O2")
        with amp.debug.find_overflow(model, replay=True) as found:
            skipped(model, optimizer, bad_batch())
        assert "it calls c10d::allreduce_" in note_of(found)
    finally:
        dist.destroy_process_group()


def test_copies_and_pickles_of_the_model_are_not_followed():
    model, optimizer = set_up(Squares, "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        for other in (twin, loaded):
            other(bad_batch()).float().mean().backward()
        skipped(model, optimizer, bad_batch())
    assert len(found.reports) == 1
    assert names_the_line(found)


def test_what_is_kept_is_let_go():
    model, optimizer = set_up(Squares, "O2")
    kept = []

    def iteration():
        batch = good_batch()
        kept.append(weakref.ref(batch))
        step(model, optimizer, batch)

    with amp.debug.find_overflow(model, replay=True):
        iteration()
        model(good_batch())  # a forward without backward
        iteration()
        assert len(kept) == 2
        assert are_dropped(*kept)
        with torch.no_grad():
            model(good_batch())
        with pytest.raises(KeyError), amp.scale_loss(model(good_batch()).float().mean(), optimizer):
            raise KeyError
        iteration()
    assert amp.last_step(optimizer).applied


@pytest.mark.parametrize("bad", [False, True])
def test_a_model_that_is_dropped_is_let_go(bad):
    amp.debug.explain_overflows(after=1, replay=True)

    def training():
        model, optimizer = set_up(Squares, "O2")
        for batch in (good_batch(), bad_batch() if bad else good_batch()):
            step(model, optimizer, batch)
        return weakref.ref(model)

    assert are_dropped(training())


def test_a_forward_of_another_thread_is_kept_while_a_step_is_run_again():
    def in_another_thread(n, x):
        if n == 2:  # the first is the skipped step itself, the second its replay
            thread = threading.Thread(target=lambda: outputs.append(model(bad_batch())))
            thread.start()
            thread.join()
        return x

    model, optimizer = set_up(changed(in_another_thread), "O2")
    outputs = []
    with amp.debug.find_overflow(model, replay=True) as found:
        skipped(model, optimizer, bad_batch())
        optimizer.zero_grad()
        backward(outputs.pop().float().mean(), optimizer)
        optimizer.step()
    assert amp.last_step(optimizer).skipped
    assert [report.causes[0].line for report in found.reports if report.causes] == [LINE, LINE], str(found)


def test_an_exception_while_it_runs_again_leaves_everything_as_it_was():
    def once(n, x):
        if n == 2:
            raise KeyboardInterrupt
        return torch.dropout(x, 0.5, True)

    model, optimizer = set_up(changed(once), "O2")
    model.register_buffer("table", torch.ones(3))
    table = model.table
    with pytest.raises(KeyboardInterrupt), amp.debug.find_overflow(model, replay=True):
        skipped(model, optimizer, bad_batch())
    assert model.table is table
    assert not model._forward_hooks
    assert torch.is_grad_enabled()
    skipped(model, optimizer, bad_batch())


def test_bad_input():
    with (
        pytest.raises(RuntimeError, match=r"replay=True.*call amp.initialize first"),
        amp.debug.find_overflow(nn.Linear(2, 2), replay=True),
    ):
        pass
    model, _ = set_up(Squares, "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        pass
    assert str(found) == "no step was skipped while this was open"
    assert not found.causes


def test_a_compiled_model():
    model, optimizer = set_up(Squares, "O2")
    compiled = torch.compile(model, backend="eager")
    for given in (compiled, model):
        with amp.debug.find_overflow(given, replay=True) as found:
            skipped(compiled, optimizer, bad_batch())
        assert names_the_line(found) or (given is model and "no forward was kept" in note_of(found)), str(found)
    torch.compiler.reset()


# ---- state that is no buffer -----------------------------------------------------------------------------------------


class KeyEncoder(Squares):
    """Writes parameters that are not trained, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        for key, query in zip(self.key.parameters(), self.fc.parameters(), strict=False):
            key.data = key.data * 0.9 + query.data.to(key.dtype) * 0.1
        return super().forward(x) + self.key(x) * 0


class Scripted(Squares):
    """Has a batch norm of ``torch.jit``, whose running averages no Python attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            self.bn = torch.jit.script(nn.BatchNorm1d(8))

    def forward(self, x):
        return super().forward(x) + self.bn(x.float()) * 0

    def kept(self):
        return {name: buffer.tolist() for name, buffer in self.bn.named_buffers()}


class Stateful(Squares):
    """Writes an attribute that is no buffer, of the kind ``holds``, and draws numbers that are none of torch's."""

    def __init__(self, holds) -> None:
        super().__init__()
        self.state, self.calls = holds(), 0

    def forward(self, x):
        self.calls += 1
        if isinstance(self.state, list):
            self.state.append(x.detach().float().mean().item())
        elif isinstance(self.state, tuple):
            self.state[0](torch.full((2, 8), float(self.calls), device=x.device))
        elif isinstance(self.state, np.random.Generator):
            x = x * (1 + self.state.random())
        elif isinstance(self.state, set):
            self.state.add(len(self.state))
        elif isinstance(self.state, dict):
            self.state["calls"] += 1
            self.state[self.calls] = x.detach()
        else:
            self.state += self.calls
        return super().forward(x * (1 + random.random()) * (1 + np.random.rand()))

    def kept(self):
        state = self.state
        if isinstance(state, tuple):
            state = state[0].running_mean.tolist()
        elif isinstance(state, np.random.Generator):
            state = state.random()
        elif isinstance(state, dict):
            state = [len(state), float(state["calls"])]
        elif isinstance(state, set):
            state = sorted(state)
        return self.calls, state if isinstance(state, (list, float)) else state.tolist(), random.random()


HOLDS = [
    list,
    lambda: torch.zeros(8, device=DEVICE),
    lambda: np.zeros(2),
    lambda: (nn.BatchNorm1d(8).to(DEVICE),),
    lambda: np.random.default_rng(0),
    lambda: {"calls": torch.zeros((), device=DEVICE)},
    set,
    Counter,
]


@pytest.mark.parametrize("make", [KeyEncoder, Scripted, *(functools.partial(Stateful, holds) for holds in HOLDS)])
def test_what_forward_writes_is_as_it_was(make):
    def trained(replay):
        random.seed(0), np.random.seed(0)
        model, optimizer = set_up(make, "O1", dynamic_init_scale=4.0)
        with amp.debug.find_overflow(model, replay=True) if replay else nullcontext() as found:
            for batch in (good_batch(), bad_batch(), good_batch()):
                step(model, optimizer, batch)
        values = [p.detach().clone() for p in model.parameters()]
        state = None if make is KeyEncoder else model.kept()
        amp.shutdown()
        return values, state, found

    values, state, _ = trained(False)
    values_too, state_too, found = trained(True)
    assert all(map(torch.equal, values, values_too))
    assert state == state_too
    assert names_the_line(found), str(found)
    assert note_of(found).startswith("run again as it was")


class Recurrent(nn.Module):
    """Its frozen weights are also in a list that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


@pytest.mark.parametrize(
    ("make", "level", "name"), [(Squares, "O2", "fc.weight"), (Recurrent, "O1", "rnn.weight_ih_l0")]
)
def test_a_parameter_that_is_nan(make, level, name):
    model, optimizer = set_up(make, level)
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = math.nan
    with amp.debug.find_overflow(model, replay=True) as found:
        skipped(model, optimizer, good_batch())
    assert [(cause.kind, cause.tensor) for cause in found.causes] == [("weights", name)], str(found)


def test_a_model_that_calls_itself():
    class Recursive(Squares):
        def forward(self, x, depth=2):
            return super().forward(x) if depth == 0 else self(x, depth - 1) * 2

    model, optimizer = set_up(Recursive, "O2", dynamic_init_scale=4.0)
    with amp.debug.find_overflow(model, replay=True) as found:
        skipped(model, optimizer, bad_batch())
    assert names_the_line(found), str(found)
    assert note_of(found).endswith(SAME)


def test_an_output_that_the_model_keeps_does_not_keep_earlier_ones():
    class Keeping(Squares):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model, _ = set_up(Keeping, "O1")
    batches = []
    with amp.debug.find_overflow(model, replay=True):
        for _ in range(4):
            batch = good_batch()
            batches.append(weakref.ref(batch))
            model(batch)
        del batch
        assert are_dropped(*batches[:-1])


# ---- arguments and outputs that depend on each other -----------------------------------------------------------------


class WithLoss(nn.Module):
    """Returns the loss and what it is computed from, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        features = self.first(x)
        logits = self.last(features)
        return {"loss": (logits.float() * 1e3).square().mean(), "logits": logits, "features": features}  # fault: loss


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("regularized", [False, True])
def test_outputs_that_others_are_computed_from(level, regularized):
    model, optimizer = set_up(WithLoss, level, dynamic_init_scale=2.0**24)
    seen = []
    model.first.weight.register_hook(lambda grad: seen.append(grad.detach().clone()))
    with amp.debug.find_overflow(model, replay=True) as found:
        outputs = model(bad_batch() * (1e16 if level == "O0" else 1.0))
        loss = outputs["loss"]
        if regularized:
            loss = loss + outputs["features"].float().square().mean()
        backward(loss, optimizer)
        optimizer.step()
    assert amp.last_step(optimizer).skipped
    once, again = seen
    torch.testing.assert_close(again, once, rtol=0, atol=0, equal_nan=True)
    assert note_of(found).endswith(SAME)
    if not regularized and level != "O0":
        (cause,) = [cause for cause in found.causes if cause.line == planted.marked_lines(__file__)["loss"]]
        assert (cause.kind, cause.phase) == ("gradient", "backward")


def test_a_model_that_is_called_with_what_it_has_returned():
    model, optimizer = set_up(lambda: nn.RNNCell(8, 8), "O1", torch.optim.SGD)
    with amp.debug.find_overflow(model, replay=True) as found:
        h = torch.zeros(2, 8).to(DEVICE)
        for _ in range(3):
            h = model(good_batch(), h)
        backward(h.float().mean() * 1e38, optimizer)
        optimizer.step()
    assert found.parameters
    assert note_of(found).endswith(SAME)


def test_the_model_that_has_overflowed_first_is_named():
    torch.manual_seed(0)
    first, second = Squares().to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    (first, second), optimizer = amp.initialize(
        [first, second], optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0, cast_model_outputs=torch.float16
    )
    with amp.debug.find_overflow(replay=True) as found:
        backward(second(first(bad_batch())).float().mean(), optimizer)
        optimizer.step()
    (cause,) = found.causes
    assert (cause.kind, cause.module, cause.line) == ("overflow", "models[0]", LINE)


def test_what_forward_takes_out_of_its_arguments_is_there_again():
    class Popping(Squares):
        def forward(self, batch, losses):
            y = super().forward(batch.pop("x"))
            losses.append(y.float().mean())
            return y

    model, optimizer = set_up(Popping, "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        losses = []
        y = model({"x": bad_batch()}, losses)
        backward(y.float().mean(), optimizer)
        optimizer.step()
    assert len(losses) == 1
    assert names_the_line(found), str(found)


# ---- how the model was called ----------------------------------------------------------------------------------------


def test_casts_and_modes_of_then():
    model, optimizer = set_up(lambda: nn.Sequential(Squares(), nn.BatchNorm1d(8)), "O1")
    with amp.debug.find_overflow(model, replay=True) as found:
        with amp.disable_casts():
            y = model(bad_batch())
        assert y.isfinite().all()  # in float32
        model.eval()
        backward((y * 0).log().mean(), optimizer)
        optimizer.step()
    assert [cause.operator for cause in found.causes] == ["none"], str(found)


def test_a_gradient_penalty_is_not_run_again():
    model, optimizer = set_up(Squares, "O0")
    with amp.debug.find_overflow(model, replay=True) as found:
        x = good_batch().requires_grad_()
        with amp.scale_loss(torch.zeros((), device=DEVICE), optimizer):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (slope.square().mean() * 1e38 * 1e3).backward()
        optimizer.step()
    assert "create_graph=True" in note_of(found)


def test_what_only_a_part_was_run_of_is_not_told(caplog):
    model, optimizer = set_up(Encoder, "O2")
    amp.debug.explain_overflows(after=1, replay=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(good_batch()).float().mean() + model.encode(bad_batch().to(model.fc.weight.dtype)).float().mean()
        backward(loss, optimizer)
        optimizer.step()
    replayed, watched = tables(caplog)
    assert "Watch an iteration" in replayed
    assert f"test_replay.py:{LINE} " in watched


def test_errors_of_the_model_do_not_reach_the_step():
    def fail(n, x):
        return x if n == 1 else {}["table"]

    model, optimizer = set_up(changed(fail), "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        skipped(model, optimizer, bad_batch())
    assert note_of(found) == "the step could not be run again: KeyError: 'table'"


def test_a_forward_that_was_interrupted_is_open_until_the_next_block():
    class Interrupted(Squares):
        def forward(self, x, stop=False):
            if stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model, optimizer = set_up(Interrupted, "O2")
    with amp.debug.find_overflow(model, replay=True) as found:
        with pytest.raises(KeyboardInterrupt):
            model(good_batch(), stop=True)
        step(model, optimizer, good_batch())
        skipped(model, optimizer, bad_batch())
    assert names_the_line(found), str(found)


def test_states_that_iterations_hand_on_do_not_keep_each_other():
    model, optimizer = set_up(lambda: nn.GRUCell(8, 8), "O1", torch.optim.SGD)
    batches = []
    with amp.debug.find_overflow(model, replay=True):
        h = torch.zeros(2, 8).to(DEVICE)
        for _ in range(4):
            batch = good_batch()
            batches.append(weakref.ref(batch))
            optimizer.zero_grad()
            h = model(batch, h)
            backward(h.float().mean(), optimizer)
            optimizer.step()
            h.detach_()
        del batch
        assert are_dropped(*batches[:-1])


def test_shutdown_ends_it():
    amp.debug.explain_overflows(after=1, replay=True)
    model, optimizer = set_up(Squares, "O2")
    batch = good_batch()
    backward(model(batch).float().mean(), optimizer)
    assert any(any(pair) for pair in hooks_of(model))
    kept = weakref.ref(batch)
    del batch
    amp.shutdown()
    assert are_dropped(kept)
    assert not any(any(pair) for pair in hooks_of(model))


def test_a_record_has_the_iteration_alone(tmp_path):
    def rows(replay):
        model, optimizer = set_up(Squares, "O2")
        amp.debug.explain_overflows(1 if replay else None, replay=replay)
        skipped(model, optimizer, bad_batch())
        with amp.debug.record(tmp_path / "run.pt", model) as recorded:
            skipped(model, optimizer, bad_batch())
        amp.debug.explain_overflows(None)
        amp.shutdown()
        return [(row.phase, row.module, row.operator) for row in recorded.rows]

    assert rows(True) == rows(False)


# ---- explain_overflows -----------------------------------------------------------------------------------------------


def test_the_skipped_step_itself_is_explained(caplog):
    amp.debug.explain_overflows(after=1, replay=True)
    model, optimizer = set_up(Squares, "O2")
    step(model, optimizer, good_batch())
    skipped(model, optimizer, bad_batch())  # the only batch that does
    (table,) = tables(caplog)
    assert f"test_replay.py:{LINE} " in table
    assert table.endswith(SAME)
    assert "1 skip in a row" in table
    for _ in range(3):
        step(model, optimizer, good_batch())
        assert amp.last_step(optimizer).applied
    assert len(tables(caplog)) == 1


def test_what_a_replay_does_not_tell_is_watched(caplog):
    fault = next(fault for fault in planted.FAULTS if fault.name == "log")
    amp.debug.explain_overflows(after=2, times=2, replay=True)
    model, optimizer, _ = planted.set_up(fault, "O2", torch.optim.SGD)
    for _ in range(5):
        planted.iterate(fault, model, optimizer)
    first, second = tables(caplog)
    assert "the code that computes the loss" in first
    assert "2 skips in a row" in first
    assert f"planted.py:{planted.MARKED['log']} " in second
    assert "3 skips in a row" in second


@pytest.mark.parametrize("sessions", [1, 2])
def test_the_first_step_of_a_session_to_come_is_explained(sessions, caplog):
    amp.debug.explain_overflows(after=1, replay=True)
    for _ in range(sessions):
        model, optimizer = set_up(Squares, "O2")
    skipped(model, optimizer, bad_batch())
    (table,) = tables(caplog)
    assert "1 skip in a row" in table
    assert f"test_replay.py:{LINE} " in table
    assert table.endswith(SAME)


def test_the_summary_does_not_advise_what_was_given(capsys):
    amp.debug.explain_overflows(after=1, replay=True)
    model, optimizer = set_up(Encoder, "O2")
    for batch in (bad_batch(), good_batch()):
        optimizer.zero_grad()
        backward(model.encode(batch.to(model.fc.weight.dtype)).float().mean(), optimizer)
        optimizer.step()
    settings.observer.end_script()
    said = capsys.readouterr().err
    assert said.startswith("--explain-overflows: 2 blocks, 1 skipped step; none was explained: no forward was kept")
    assert "--replay" not in said


def test_several_optimizers_for_one_loss_have_one_table(caplog):
    torch.manual_seed(0)
    first, second = Squares().to(DEVICE), nn.Linear(8, 1).to(DEVICE)
    both = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (first, second)]
    (first, second), both = amp.initialize(
        [first, second], both, opt_level="O2", loss_scale="dynamic", verbosity=0, dynamic_init_scale=4.0
    )
    amp.debug.explain_overflows(after=1, replay=True)
    before = hooks_of_torch()
    for batch in (good_batch(), bad_batch(), good_batch()):
        for optimizer in both:
            optimizer.zero_grad()
        backward(second(first(batch)).float().mean(), both)
        for optimizer in both:
            optimizer.step()
    assert len(tables(caplog)) == 1
    assert hooks_of_torch() == before  # no iteration is about to be watched


def test_no_more_than_asked_for(caplog):
    model, optimizer = set_up(Squares, "O2")
    amp.debug.explain_overflows(after=1, times=1, replay=True)
    for _ in range(3):
        skipped(model, optimizer, bad_batch())
    assert len(tables(caplog)) == 1
    assert not model._forward_hooks


@pytest.mark.parametrize("options", [{}, {"combine_grad": True, "fuse_unscale": True}])
def test_clipped_gradients(options):
    model, optimizer = set_up(Squares, "O2", optimizers.NpuFusedSGD, **options)
    with amp.debug.find_overflow(model, replay=True) as found:
        backward(model(bad_batch()).float().mean(), optimizer)
        if options:
            optimizer.clip_optimizer_grad_norm_fused(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    assert names_the_line(found), str(found)
    assert note_of(found).startswith("run again")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("fault", planted_more.FAULTS, ids=lambda fault: fault.name)
def test_planted_elsewhere(fault, level):
    model, made, _ = planted.set_up(fault, level, torch.optim.SGD)
    with amp.debug.find_overflow(model, replay=True) as found:
        planted.iterate(fault, model, made)
    if amp.last_step(made).applied:
        assert str(found) == "no step was skipped while this was open"
    elif not found.causes:
        assert "could not be run again" in note_of(found) or "its gradients are finite" in note_of(found)
    elif found.causes[0].operator != "none":
        fault.check(found, level, planted_more.MARKED)
