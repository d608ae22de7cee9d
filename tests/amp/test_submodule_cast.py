# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Submodules of an O2, O3 or O5 model that a script calls by themselves."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from devices import DEVICE, needs
from processes import HANG_TIMEOUT
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex_npu import amp

pytestmark = pytest.mark.host

HALF = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.decoder = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.dtype)
        return self.decoder(self.encoder(x)) * self.scale

    def decode(self, z):
        return self.decoder(z) * self.scale


def make(level, model=None):
    torch.manual_seed(0)
    return amp.initialize((model or Autoencoder()).to(DEVICE), opt_level=level, verbosity=0)


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("level", HALF)
def test_called_by_themselves_they_take_float32(level):
    model = make(level)
    reference = Autoencoder().to(DEVICE)
    reference.load_state_dict(model.state_dict())
    z = model.encoder(x(3, 4))
    assert z.dtype == HALF[level]
    torch.testing.assert_close(z.float(), reference.encoder(x(3, 4)), rtol=2e-2, atol=2e-2)
    # Half precision in, half precision out: nothing changes for scripts that cast explicitly, as was required.
    assert torch.equal(model.encoder(x(3, 4).to(HALF[level])), z)
    assert model.encoder[0](x(3, 4)).dtype == HALF[level]
    assert model.decode(x(3, 8)).dtype == HALF[level]
    assert model.attention(x(2, 3, 8), key=x(2, 3, 8), value=x(2, 3, 8))[0].dtype == HALF[level]
    assert model.rnn(x(2, 3, 8))[0].dtype == HALF[level]
    packed = nn.utils.rnn.pack_padded_sequence(x(2, 3, 8), [3, 2], batch_first=True)
    assert model.rnn(packed)[0].data.dtype == HALF[level]


def test_inside_the_forward_nothing_is_cast_twice():
    class Boxes(nn.Module):
        """Takes coordinates, which half precision would ruin, beside its features."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, features, boxes):
            return self.layer(features), boxes

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Boxes()

        def forward(self, features):
            return self.head(features, torch.full((1,), 4097.0))

    model = make("O2", Detector())
    assert model(x(1, 2))[1].item() == 4097.0  # 4096 in float16
    assert model.head(x(1, 2), torch.full((1,), 4097.0))[1].item() == 4096.0


@needs("errors_at_the_call")
def test_after_an_exception_in_the_forward_submodules_still_cast():
    model = make("O2")
    with pytest.raises(RuntimeError):
        model(x(3, 5))
    assert model.encoder(x(3, 4)).dtype == torch.float16


@pytest.mark.parametrize("level", HALF)
def test_a_model_that_calls_itself(level):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, depth=2):
            return self.layer(self(x, depth - 1) if depth else x)

    model = make(level, Recursive())
    layers, z = model.layer, x(3, 4)
    expected = layers(layers(layers(z)))
    assert expected.dtype == HALF[level]
    assert torch.equal(model(z), expected.float())


class Normalised(nn.Module):
    """Keeps a sum in float32, and records the dtype of the input of its norm."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        normed = nn.functional.layer_norm(x.float(), (4,), self.gain.float()).to(x.dtype)
        return x + self.layer(normed.to(self.layer.weight.dtype)).to(x.dtype)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Normalised(), Normalised()])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.float()
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("level", HALF)
def test_what_checkpointing_computes_again_is_cast_as_in_the_forward(level):
    def grads(use_reentrant):
        model = make(level, Checkpointed(use_reentrant))
        model(x(3, 4).requires_grad_()).square().sum().backward()
        return [p.grad for p in model.parameters()]

    for use_reentrant in (False, True):
        torch.testing.assert_close([*grads(use_reentrant)], [*grads(None)], rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_submodule_by_itself_can_be_checkpointed(use_reentrant):
    model = make("O2")
    z = checkpoint(model.encoder, x(3, 4).requires_grad_(), use_reentrant=use_reentrant)
    z.float().sum().backward()
    assert model.encoder[0].weight.grad.abs().sum() > 0


def test_another_thread_is_another_call():
    """A submodule called directly in one thread, while the model runs in another."""
    model = make("O2")
    inside, done = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        done.wait()

    model.decoder.register_forward_hook(wait)
    thread = threading.Thread(target=model, args=(x(3, 4),))
    thread.start()
    try:
        assert inside.wait(HANG_TIMEOUT)
        assert model.encoder(x(3, 4)).dtype == torch.float16
    finally:
        done.set()
        thread.join()


@needs("mixed_operands")
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("first", ["model", "encoder", "optimizer"])
def test_copies_that_are_made_with_the_optimizer_cast_by_their_own(how, first):
    """A submodule that is copied before its model is of the model's copy."""
    model = Autoencoder().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    given = {"encoder": model.encoder, "optimizer": optimizer, "model": model}
    copied = how({first: given[first], **given})
    twin = copied["model"]
    assert copied["encoder"] is twin.encoder
    assert {hook.of.model for m in twin.modules() for hook in m._forward_pre_hooks.values()} == {twin}
    assert twin(x(3, 4)).dtype == torch.float32
    assert twin.encoder(x(3, 4)).dtype == torch.float16
    amp.shutdown()
    assert model.encoder(x(3, 4)).dtype == twin.encoder(x(3, 4)).dtype == torch.float32


def test_submodules_that_are_kept_without_their_model_stay_at_its_level():
    model = make("O2")
    expected = copy.deepcopy(model.encoder).state_dict()
    encoder = model.encoder.eval()
    del model
    gc.collect()
    assert encoder(x(3, 4)).dtype == torch.float16
    amp.shutdown()
    assert encoder(x(3, 4)).dtype == torch.float32
    assert all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize("how", [copy.copy, lambda m: m.forward])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_made_of_a_model_outlives_it(level, how):
    model = make(level)
    expected = model(x(3, 4))
    made = how(model)
    del model
    gc.collect()
    assert torch.equal(made(x(3, 4)), expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda forward: pickle.loads(pickle.dumps(forward))])
def test_a_copy_of_a_forward_has_weights_of_its_own(how):
    model = make("O1")
    forward = how(model.forward)
    expected = forward(x(3, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(forward(x(3, 4)), expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_other_levels_need_none(level):
    model = make(level)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_fused_path_of_transformer_layers_stays():
    model = make("O2", nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True)))
    assert model[0]._forward_pre_hooks
    assert not any(m._forward_pre_hooks for m in model[1].modules())


def test_replicas_of_data_parallel_run_as_one_forward():
    model = make("O2")
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(replica._modules)
    replica.seen = []
    assert replica(x(3, 4)).dtype == torch.float32
    assert replica.seen == [torch.float16]


class Compiled(nn.Module):
    """Methods that torch.compile is given, as trainers do with ``training_step``."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = Scaled()

    def forward(self, x):
        return self.head(self.encoder(x).float())  # in float32, as the author has decided

    def call_submodules(self, x):
        return self.head(self.encoder(x))

    def call_itself(self, x):
        return self(x)

    def checkpointed(self, x):
        return checkpoint(self.encoder, x, use_reentrant=False)

    def in_two_graphs(self, x):
        y = self.encoder(x)
        torch._dynamo.graph_break()
        return self.head(self.encoder(x)) + y


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 1.001, 1.002, 1.003]))

    def forward(self, x):
        return x * self.w.to(x.dtype)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="what is traced is the same on all devices")
@pytest.mark.parametrize("method", ["call_submodules", "call_itself", "checkpointed", "in_two_graphs"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_compiled_method_gives_what_it_gives_uncompiled(level, method):
    torch._dynamo.reset()
    model = make(level, Compiled())
    run = getattr(model, method)
    expected = run(x(3, 4))
    found = torch.compile(run, backend="eager", fullgraph=method != "in_two_graphs")(x(3, 4))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x(3, 4)), model(x(3, 4)))
    torch._dynamo.reset()
