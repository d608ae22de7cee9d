# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``initialize`` more than once, ``shutdown``, and threads."""

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from devices import DEVICE, needs, require
from small_programs import backward, step_on
from torch import nn

from apex_npu import amp, optimizers

pytestmark = pytest.mark.host

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
HALF = {"O1": torch.float16, "O4": torch.bfloat16}


class Net(nn.Module):
    """Remembers the dtype that its layer has computed in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.seen = None

    def forward(self, x):
        x = self.layer(x)
        self.seen = x.dtype
        return self.head(x.relu())


def make(level, cls=optimizers.NpuFusedSGD, loss_scale=128.0, **options):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = cls(model.parameters(), lr=0.05)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0, **options)


def train(model, optimizer, steps=3, loss_id=0):
    losses = []
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        step_on(loss, optimizer, loss_id=loss_id)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", LEVELS)
def test_each_model_keeps_the_level_it_was_initialised_at(first, second):
    if "O4" in (first, second):
        require("autocast_to_bfloat16")
    expected = train(*make(first))
    amp.shutdown()
    one = make(first)
    two = make(second)
    dtypes = {"O0": torch.float32, "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, **HALF}
    # The scales of the second call count for both.
    assert train(*one) == pytest.approx(expected, rel=1e-2)
    assert one[0].seen == dtypes[first]
    train(*two)
    assert two[0].seen == dtypes[second]


@pytest.mark.skipif(torch.__version__ < "2.9", reason="Dynamo breaks the graph at a context manager of a generator")
def test_a_compiled_model_keeps_out_the_casts_of_a_later_initialize():
    torch._dynamo.reset()
    model, _ = make("O0")
    make("O1")
    x = torch.ones(2, 4, device=DEVICE)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), rtol=0, atol=0)
    assert model.seen == torch.float32


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_clipping_is_watched_for_the_optimizers_of_an_earlier_initialize(level):
    model, optimizer = make(level, fuse_unscale=True)
    make("O1")
    backward(model(torch.ones(2, 4, device=DEVICE)).sum(), optimizer)
    with pytest.warns(RuntimeWarning, match="gradients that fuse_unscale=True keeps multiplied"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_disabling_amp_for_a_second_pair_leaves_plain_training():
    make("O1")
    model, optimizer = make("O1", enabled=False)
    losses = train(model, optimizer)
    assert model.seen == torch.float32
    torch.manual_seed(0)
    twin = Net().to(DEVICE)
    assert losses == train(twin, torch.optim.SGD(twin.parameters(), lr=0.05))


@pytest.mark.parametrize("level", LEVELS)
def test_shutdown_ends_the_casts(level):
    model, optimizer = make(level)
    train(model, optimizer)
    amp.shutdown()
    amp.shutdown()  # nothing is left to do
    x = torch.ones(2, 4, device=DEVICE, dtype=next(model.parameters()).dtype)
    assert model(x).dtype == x.dtype
    assert not any(m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="amp has not been initialized"), amp.scale_loss(x.sum(), optimizer):
        pass


@pytest.mark.sweep
def test_two_hundred_cycles_keep_nothing():
    def cycle(number):
        level = LEVELS[number % len(LEVELS)]
        model, optimizer = make(level, combine_grad=True)
        train(model, optimizer, steps=1)
        if number % 3:
            amp.shutdown()

    for number in range(len(LEVELS) * 3):
        cycle(number)  # what is made once: kernels, caches, classes
    amp.shutdown()
    gc.collect()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(2):
            for number in range(100):
                cycle(number)
            amp.shutdown()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # Python's own caches breathe by some kilobytes; a thing kept per cycle would be a hundred of some hundred bytes.
    assert sizes[1] - sizes[0] < 20_000


def test_the_same_model_again_and_again():
    model = Net().to(DEVICE)
    for number in range(10 * len(LEVELS)):
        amp.initialize(model.float(), opt_level=LEVELS[number % len(LEVELS)], verbosity=0)
    assert len(amp.session.current().models) <= 2  # the one before is let go with the next
    assert max(len(m._forward_pre_hooks) + len(m._state_dict_hooks) for m in model.modules()) <= 2
    amp.shutdown()
    assert not any(m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
    assert "forward" not in vars(model)


# --------------------------------------------------------------------------------------------------------- threads


@needs("flag_of_a_thread")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_threads_share_one_initialize(level):
    """Each with its own model, optimizer and loss_id: the same numbers as one after the other."""

    def pairs():
        torch.manual_seed(0)
        models = [Net().to(DEVICE) for _ in range(2)]
        opts = [optimizers.NpuFusedAdam(m.parameters(), lr=1e-2) for m in models]
        models, opts = amp.initialize(models, opts, opt_level=level, num_losses=2, verbosity=0)
        return list(zip(models, opts, range(2), strict=True))

    def run(model, optimizer, loss_id):
        return train(model, optimizer, 20, loss_id), model.seen

    expected = [run(*pair) for pair in pairs()]
    amp.shutdown()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: run(*pair), pairs()))
    assert [r[1] for r in results] == [e[1] for e in expected]
    # In O1's own thread the loss is cast, too, elsewhere the model alone.
    for result, wanted in zip(results, expected, strict=True):
        assert result[0] == pytest.approx(wanted[0], rel=1e-3)


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("call", [lambda: make("O2"), lambda: make("O1", enabled=False), amp.shutdown])
def test_another_threads_amp_is_not_taken_away(call):
    model, optimizer = make("O1")
    with pytest.raises(RuntimeError, match=r"while thread 'MainThread' uses amp: .* amp.shutdown\(\) in the other"):
        in_thread(call)
    train(model, optimizer)
    assert model.seen == torch.float16


def test_the_amp_of_a_thread_that_has_ended_can_be_replaced():
    thread = threading.Thread(target=make, args=("O1",))
    thread.start()
    thread.join()
    model, optimizer = make("O2")
    train(model, optimizer)
    assert model.seen == torch.float16


def test_a_patch_of_distributed_data_parallel_that_comes_later_stays(monkeypatch):
    amp.initialize(nn.Linear(2, 2).to(DEVICE), opt_level="O1", verbosity=0)

    def init(self, *args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", init)
    amp.shutdown()
    assert nn.parallel.DistributedDataParallel.__init__ is init
