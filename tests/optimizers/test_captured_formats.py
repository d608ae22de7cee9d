# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``capturable`` with states in fewer bytes: the bits of steps that the host counts, also where a graph replays them.

``test_on_triton.py`` has the same for Triton's kernels without a GPU.
"""

import gc
import weakref

import pytest
import torch
from devices import DEVICE, SIMULATOR, needs_counts
from encoded_steps import APPLIED, RULES, SOME, Training, assert_same_bits, cases, compute_on, simulated

pytestmark = pytest.mark.device

ON_HOST = DEVICE.type == "cpu"
needs_device = pytest.mark.skipif(ON_HOST, reason="on a CPU steps are counted by the host, and nothing is captured")


@cases()
def test_steps_that_the_device_counts_and_skips_have_the_bits_of_those_of_the_host(rule, form, monkeypatch):
    found = Training(rule, form, DEVICE, capturable=True).run()
    if not ON_HOST:
        compute_on(DEVICE, monkeypatch)
    assert_same_bits(found, Training(rule, form, DEVICE, capturable=False).run())
    assert set(found.counts()) <= {APPLIED}


@needs_device
@cases()
def test_replayed_steps_have_the_bits_of_eager_ones(rule, form):
    found = Training(rule, form, DEVICE, capturable=True).run_captured(simulated)
    assert_same_bits(found, Training(rule, form, DEVICE, capturable=True).run())
    assert set(found.counts()) <= {APPLIED}


def captured_by_the_gpu(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("triton", [True, False])
@cases()
def test_a_graph_of_a_gpu_has_the_bits_of_eager_steps(rule, form, triton, monkeypatch):
    if not triton:
        monkeypatch.setattr("apex_npu.ops.cuda._plans", lambda: None)
    expected = Training(rule, form, DEVICE, capturable=True).run()
    found = Training(rule, form, DEVICE, capturable=True)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        found.run_captured(captured_by_the_gpu)
    torch.cuda.current_stream().wait_stream(aside)
    if rule != "Muon" and (triton or RULES[rule][0].elementwise):
        assert_same_bits(found, expected)
    else:
        # Products may take other algorithms in a capture, and torch adds norms by atomic operations: what is encoded
        # may be rounded the other way, by one code.
        torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=0.1)
    assert set(found.counts()) <= {APPLIED}


@needs_counts()
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("rule", "form"), SOME)
def test_no_step_waits_for_the_device(rule, form, capturable):
    """Tables are made in the first step alone: a copy from the host would wait, and could not be captured."""
    training = Training(rule, form, DEVICE, capturable=capturable)
    training.step(2)

    def step():
        with SIMULATOR.count() as n:
            training.optimizer.step()
        assert n.launches
        assert n.syncs == n.d2h == n.h2d == 0

    training.step(3, step)


@needs_device
def test_what_a_graph_reads_of_encodings_outlives_another_cut():
    training = Training("LAMB", "int8", DEVICE, capturable=True)
    step = training.optimizer.step

    def places():
        (group,) = training.optimizer.fused_groups()
        return weakref.ref(group.runs.current[0]._places)

    def without_one(do):
        def wrapped():
            training.params[1].grad = None
            do()

        return wrapped

    training.step(2)
    eager = places()
    training.step(3, without_one(step))
    captured = places()
    training.step(3, without_one(lambda: simulated(step)))
    training.step(6)
    gc.collect()
    assert eager() is None
    assert captured() is not None
