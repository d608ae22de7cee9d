# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole iterations under amp in a graph: replayed, they are the iterations that Python would have run."""

import pytest
import torch
from captures import Capture
from devices import DEVICE, needs, require
from small_programs import backward
from torch import nn

from apex_npu import amp, optimizers

needs_device = pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is captured on a CPU")


def initialized(opt_level, optimizer=optimizers.NpuFusedSGD, **options):
    """A small model and its optimizer, capturable where that is an option."""
    model = nn.Linear(3, 2).to(DEVICE)
    capturable = {"capturable": True} if hasattr(optimizer, "supports_capture") else {}
    made = optimizer(model.parameters(), lr=0.1, **capturable)
    return amp.initialize(model, made, opt_level=opt_level, verbosity=0, **options)


def loss_of(model):
    return model(torch.ones(1, 3, device=DEVICE)).float().sum()


class Training:
    """A small network, its iterations, and how many steps each parameter has had."""

    def __init__(self, opt_level, options, clip, formats=None):
        self.generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=self.generator))
        self.model.to(DEVICE)
        self.formats = formats or {}
        self.optimizer = optimizers.NpuFusedAdam(self.model.parameters(), lr=0.01, capturable=True, **self.formats)
        self.under_amp, self.clip = opt_level is not None, clip
        if self.under_amp:
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=opt_level, verbosity=0, **options
            )
        self.x = torch.zeros(4, 6, device=DEVICE)

    def next_input(self):
        self.x.copy_(torch.randn(4, 6, generator=self.generator))

    def iterate(self):
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean()
        if self.under_amp:
            backward(loss, self.optimizer)
        else:
            loss.backward()
        if self.clip:
            self.optimizer.clip_optimizer_grad_norm_fused(0.1)
        self.optimizer.step()

    def run(self, steps, iterate=None):
        for _ in range(steps):
            self.next_input()
            (iterate or self.iterate)()

    def stepped(self):
        return self.optimizer.param_groups[0]["params"]

    def values(self):
        """Copies, since shutdown makes the model float32: of its parameters, of what is stepped, and of states."""
        state = self.optimizer.state_dict()["state"]
        states = [value for entry in state.values() for value in entry.values() if torch.is_tensor(value)]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.stepped(), *states)]

    def check_seven_steps(self, opt_level, options, **tolerance):
        """Against as many by Python."""
        assert [self.optimizer.state[p]["step"].item() for p in self.stepped()] == [7.0] * 4
        found = self.values()
        amp.shutdown()
        expected = Training(opt_level, options, self.clip, self.formats)
        expected.run(7)
        torch.testing.assert_close(found, expected.values(), **tolerance)


# Amp's level and options, and the formats of the optimizer.
ITERATIONS = [
    (None, {}, {}),
    (None, {}, {"state_dtype": "int8"}),
    ("O0", {}, {}),
    ("O1", {"loss_scale": 128.0}, {"state_dtype": torch.bfloat16}),
    ("O2", {"loss_scale": 128.0}, {}),
    ("O2", {"loss_scale": 128.0}, {"state_dtype": "int8"}),
    ("O2", {"loss_scale": 128.0, "fuse_unscale": True}, {}),
    ("O0", {"loss_scale": 128.0, "fuse_unscale": True}, {}),
    ("O4", {}, {}),
    ("O5", {}, {}),
    ("O5", {"fuse_unscale": True}, {}),
    ("O5", {"master_weights": False}, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    ("O5", {"store_param_remainders": True}, {}),
    ("O5", {"store_param_remainders": True, "fuse_unscale": True, "loss_scale": 128.0}, {"state_dtype": "int8"}),
]
whole_iterations = pytest.mark.parametrize(
    ("opt_level", "options", "formats", "clip"), [(*case, clip) for clip in (False, True) for case in ITERATIONS]
)


@needs_device
@whole_iterations
def test_replayed_iterations_are_those_of_python(opt_level, options, formats, clip):
    if opt_level is not None:
        require("flag_on_the_device")
    training = Training(opt_level, options, clip, formats)
    training.run(3)
    with Capture() as graph:
        training.iterate()
    training.run(4, graph.replay)
    training.check_seven_steps(opt_level, options, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@whole_iterations
def test_a_graph_of_a_gpu_replays_whole_iterations(opt_level, options, formats, clip):
    """As torch's notes on CUDA graphs have it, with the first iterations in a side stream."""
    training = Training(opt_level, options, clip, formats)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        training.run(3)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.iterate()
    training.run(4, graph.replay)
    # A product may take another algorithm in a capture; one step is up to 0.01. What is encoded may be rounded the
    # other way then: by one code, or one unit in the last place of a bfloat16 parameter.
    encodes = formats or "store_param_remainders" in options
    training.check_seven_steps(opt_level, options, rtol=0, atol=3e-2 if encodes else 1e-3)


def test_a_dynamic_scale_is_refused_with_nothing_done():
    model, optimizer = initialized("O2", loss_scale="dynamic", dynamic_init_scale=128.0)
    loss = loss_of(model)
    says = r"cannot be captured in a CUDA graph with a dynamic loss scale: .*loss_scale=128\.0.*Nothing"
    with pytest.raises(RuntimeError, match=says), Capture(), amp.scale_loss(loss, optimizer):
        pass
    before = model.weight.detach().clone()
    backward(loss, optimizer)
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.1, rtol=0, atol=1e-3)  # gradients of ones, in float16


def test_averages_over_processes_are_refused_with_nothing_done(monkeypatch):
    model, optimizer = initialized("O0")
    monkeypatch.setattr(optimizer._amp_state, "parallel", object())
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match=r"cannot be captured .*combine_ddp=True"), Capture():
        amp.scale_loss(loss, optimizer).__enter__()


@needs_device
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_first_iteration_in_a_capture_is_refused_with_the_parameters_where_they_were(opt_level):
    model, optimizer = initialized(opt_level, loss_scale=128.0)
    before = model.weight.detach().cpu().float()
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"), Capture():
        amp.scale_loss(loss, optimizer).__enter__()
    for p in (model.weight, optimizer.param_groups[0]["params"][0]):
        torch.testing.assert_close(p.detach().cpu().float(), before, rtol=1e-3, atol=1e-3)


@needs("flag_on_the_device")
@needs_device
def test_a_model_that_is_about_to_move_is_refused():
    model, optimizer = initialized("O5")

    def iteration():
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        optimizer.step()

    iteration()
    model.weight.data = model.weight.detach().clone()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="before the same step has run outside of it"), Capture():
        iteration()
    assert torch.equal(model.weight, before)
    iteration()
    with Capture():
        iteration()


@needs_device
@pytest.mark.parametrize("option", ["delay_unscale", "delay_overflow_check"])
def test_what_the_host_would_have_to_remember_is_refused(option):
    model, optimizer = initialized("O0", loss_scale=128.0)
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="with delay_unscale or delay_overflow_check"), Capture():
        amp.scale_loss(loss, optimizer, **{option: True}).__enter__()


@needs("flag_on_the_device")
@needs_device
def test_a_block_that_was_captured_without_its_step_is_told_of():
    model, optimizer = initialized("O5")

    def block():
        backward(loss_of(model), optimizer)

    block()
    optimizer.step()
    with Capture():
        block()
    with pytest.raises(RuntimeError, match="captured in a CUDA graph without its step"):
        optimizer.step()
    block()
    optimizer.step()


def test_an_optimizer_that_is_not_capturable_is_refused_before_its_block():
    model, optimizer = initialized("O5", torch.optim.SGD)
    loss = loss_of(model)
    for capture in (amp.scale_loss(loss, optimizer).__enter__, optimizer.step):
        with pytest.raises(RuntimeError, match=r"which is not capturable: use one of apex_npu\.optimizers"), Capture():
            capture()


@needs_device
@pytest.mark.parametrize("fuse_unscale", [False, True])
def test_a_step_alone_that_goes_by_what_one_block_has_found_is_refused(fuse_unscale):
    model, optimizer = initialized("O0", loss_scale="dynamic", fuse_unscale=fuse_unscale)

    def block():
        backward(loss_of(model), optimizer)

    block()
    optimizer.step()
    block()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="block outside of the capture, with a dynamic"), Capture():
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
