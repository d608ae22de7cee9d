# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Without the C++ extension: the same results and state dicts, and errors that name the command which builds it.

A process of its own has none. It runs ``main`` below; so do the tests, with the extension, and compare.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from devices import DEVICE, START_SCRIPT, needs, needs_extension
from lockstep import assert_equal_params, assert_equal_states
from optimizer_specs import SPECS
from small_programs import initialize
from torch import nn

from apex_npu import amp, optimizers
from apex_npu._extension import REBUILD

pytestmark = needs_extension

# Empty, 0-d, one element; a transposed matrix.
SHAPES = [(4, 6), (), (0,), (1,), (9,), (5, 3)]
RULES = {f"{spec} {i}": (spec, options) for spec in SPECS for i, options in enumerate(spec.variants)}
LEVELS = ["O0", "O1", "O2", "O4", "O5"]
KINDS = {"fused": {}, "folded": {"fuse_unscale": True}, "combine_grad": {"combine_grad": True}}
NAMED = {
    "sgd_": optimizers.NpuFusedSGD,
    "adam_": optimizers.NpuFusedAdam,
    "rmsprop_": optimizers.NpuFusedRMSprop,
    "lamb_": optimizers.NpuFusedLamb,
}
CASES = [(level, kind) for level in LEVELS for kind in KINDS]


def make_params():
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]
    params[0].data = params[0].data.t()
    return params


def step(optimizer, params, steps):
    """``steps``, in one of which a parameter has no gradient."""
    for i in steps:
        generator = torch.Generator().manual_seed(100 + i)
        for k, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(DEVICE)
            p.grad = None if k == i == 1 else grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not any(p.grad.any() for p in params if p.grad is not None)


def train_rule(name, loaded=None):
    """Parameters and state after four steps; from those of ``loaded`` after two more."""
    spec, options = RULES[name]
    params = make_params()
    optimizer = spec.cls(params, **options)
    if loaded is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        for p, value in zip(params, loaded["params"], strict=True):
            p.data.copy_(value)
    step(optimizer, params, range(4) if loaded is None else range(4, 6))
    return {"params": [p.detach().clone() for p in params], "optimizer": optimizer.state_dict()}


def train_level(level, kind):
    """Steps of which one is skipped, with clipping; a checkpoint is loaded half way."""

    def start():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(DEVICE)
        optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-2)
        options = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**7, **KINDS[kind]}
        return initialize(model, optimizer, level, **options)

    model, optimizer = start()
    for i in range(6):
        if i == 3:
            saved = [part.state_dict() for part in (model, optimizer, amp)]
            amp.shutdown()
            model, optimizer = start()
            for part, state in zip((model, optimizer, amp), saved, strict=True):
                part.load_state_dict(state)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        optimizer.zero_grad(set_to_none=i % 2 == 1)  # after the overflow they are zeroed
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
            (scaled_loss * (float("inf") if i == 1 else 1.0)).backward()
        optimizer.clip_optimizer_grad_norm_fused(0.1)
        optimizer.step()
    result = {"model": model.state_dict(), "scale": amp.state_dict()["loss_scaler0"]["loss_scale"]}
    amp.shutdown()
    return result


def said(call):
    """What ``call`` raises, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            raised = ""
        except RuntimeError as error:
            raised = str(error)
    amp.shutdown()
    return raised, [str(warning.message) for warning in caught]


def refusals():
    from apex_npu.contrib.combine_tensors import combine_npu

    def initialized(cls=optimizers.NpuFusedSGD, **options):
        model = nn.Linear(2, 2).to(DEVICE)
        return initialize(model, cls(model.parameters(), lr=0.1), loss_scale=None, **options)[1]

    names = ["optimizer_combined_params", "optimizer_combined_grads", "optimizer_combined_grad_masks"]
    names += ["model_combined_params"]
    found = {name: said(lambda name=name: getattr(initialized(), f"get_{name}")()) for name in names}
    found["of torch"] = said(lambda: initialized(torch.optim.SGD).get_optimizer_combined_grads())
    found["combine_ddp"] = said(lambda: initialized(combine_grad=True, combine_ddp=True))
    found["remainders"] = said(lambda: initialized(store_param_remainders=True))
    found["combine_npu"] = said(lambda: combine_npu([torch.ones(3, device=DEVICE)]))
    found["combine_grad"] = said(lambda: initialized(combine_grad=True))
    return found


def sparse(cls):
    """What a step with a sparse gradient beside a dense one raises, and the parameters after it."""
    params = [nn.Parameter(torch.ones(4, 3, device=DEVICE)) for _ in range(2)]
    optimizer = cls(params, lr=0.1)
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    return said(optimizer.step), [p.detach() for p in params]


def profiled(cls):
    """The ranges of the library in a profile of a step."""
    params = make_params()
    optimizer = cls(params, lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(optimizer, params, range(1))
    return {event.key for event in profile.key_averages() if event.key.startswith("apex_npu::")}


def main(path, given=None):
    rules = {name: train_rule(name) for name in RULES}
    continued = {} if given is None else {name: train_rule(name, given[name]) for name in RULES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        levels = {case: train_level(*case) for case in CASES}
    names = {name: profiled(cls) for name, cls in NAMED.items()}
    found = {"rules": rules, "continued": continued, "levels": levels, "refusals": refusals(), "names": names}
    torch.save({**found, "sparse": {name: sparse(cls) for name, cls in NAMED.items()}}, path)


def without_extension(*command):
    environment = {**os.environ, "PYTHONPATH": processes.PYTHONPATH, "APEX_NPU_NO_EXT": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(made_once, tmp_path_factory):
    """What ``main`` finds with the extension, and without."""

    def make():
        folder = tmp_path_factory.mktemp("without_extension")
        main(folder / "with")
        torch.save(torch.load(folder / "with")["rules"], folder / "given")
        without_extension(*START_SCRIPT, __file__, str(folder / "without"), str(folder / "given"))
        return str(folder)

    folder = Path(made_once("without_extension", make))
    return [torch.load(folder / name) for name in ("with", "without")]


@pytest.mark.parametrize("name", RULES)
def test_every_rule(found, name):
    ours, theirs = (part["rules"][name] for part in found)
    tolerance = RULES[name][0].tolerance
    assert_equal_params(theirs["params"], ours["params"], tolerance)
    assert theirs["optimizer"]["param_groups"] == ours["optimizer"]["param_groups"]
    assert_equal_states(theirs["optimizer"]["state"], ours["optimizer"]["state"], tolerance)


@pytest.mark.parametrize("name", RULES)
def test_state_dicts_load_in_both_directions(found, name):
    ours, theirs = (part["rules"][name] for part in found)
    assert {k: v.keys() for k, v in ours["optimizer"]["state"].items()} == {
        k: v.keys() for k, v in theirs["optimizer"]["state"].items()
    }
    tolerance = RULES[name][0].tolerance
    of_ours, of_theirs = found[1]["continued"][name], train_rule(name, theirs)
    assert_equal_params(of_ours["params"], of_theirs["params"], tolerance)
    assert_equal_params(of_ours["params"], train_rule(name, ours)["params"], tolerance)


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_every_level(found, level, kind):
    ours, theirs = (part["levels"][level, kind] for part in found)
    assert theirs["scale"] == ours["scale"] == 2.0**6
    assert theirs["model"].keys() == ours["model"].keys()
    for name, value in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], value, rtol=1e-4, atol=1e-5)


def test_what_needs_the_extension_names_the_command_that_builds_it(found):
    for name, (raised, texts) in found[1]["refusals"].items():
        if name == "combine_grad":  # which trains
            assert not raised
            (raised,) = [text for text in texts if "combine_grad=True" in text]
        assert REBUILD in raised, name
    assert not any(raised or texts for raised, texts in found[0]["refusals"].values() if "combine_ddp" not in raised)


@pytest.mark.parametrize("name", NAMED)
def test_a_sparse_gradient_is_refused_before_the_first_update(found, name):
    ours, theirs = (part["sparse"][name] for part in found)
    assert "parameter 1 of shape (4, 3) has a sparse gradient" in ours[0][0]
    assert theirs[0] == ours[0]
    assert all(torch.equal(p, torch.ones_like(p)) for p in (*ours[1], *theirs[1]))


@pytest.mark.parametrize("name", NAMED)
def test_profilers_show_the_rules(found, name):
    assert all(f"apex_npu::{name}" in part["names"][name] for part in found)


def test_doctor_says_it_first():
    first = without_extension("-m", "apex_npu", "doctor").splitlines()[:4]
    assert any("nothing is fused" in line for line in first)


# DistributedDataParallel is refused at O2, where it would not average; sharded parameters are stepped.
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize(
    ("worker", "checks"),
    [
        ("beside_worker.py", ["ddp_without_extension"]),
        pytest.param("sharded_worker.py", ["same_as_torch", "tied_parameters"], marks=needs("fully_shard")),
    ],
)
def test_two_processes(worker, checks):
    processes.run(Path(__file__).parent / "distributed" / worker, *checks, APEX_NPU_NO_EXT="1")


if __name__ == "__main__":
    main(sys.argv[1], torch.load(sys.argv[2]))
