# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From amp to torch.amp and back, as ``docs/migrating.md`` writes it: the code runs, and the training goes on."""

import copy
import re
from pathlib import Path

import pytest
import torch
from devices import DEVICE

from apex_npu import amp

TEXT = (Path(__file__).parents[2] / "docs/migrating.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## Leaving for torch.amp\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", SECTION, flags=re.DOTALL | re.MULTILINE)


def weights(names):
    return [parameter.detach().cpu().clone() for parameter in names["model"].parameters()]


def test_the_training_goes_on_there_and_back():
    assert len(BLOCKS) == 3
    names = {}
    torch.manual_seed(0)
    with_amp, with_torch, back = (block.replace('device = "cpu"', f'device = "{DEVICE.type}"') for block in BLOCKS)
    exec(with_amp, names)
    after_one = weights(names)
    scale = amp.state_dict()["loss_scaler0"]
    assert scale == {"loss_scale": 2.0**16, "unskipped": 1}
    # A second step of amp's is what torch.amp's step, from the checkpoint, has to come to.
    names["saved"] = copy.deepcopy(names["saved"])
    exec(with_amp.partition("verbosity=0)\n")[2].partition("saved =")[0], names)
    after_two = weights(names)
    assert any((one != two).any() for one, two in zip(after_one, after_two, strict=True))
    amp.shutdown()
    exec(with_torch, names)
    for one, two in zip(weights(names), after_two, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert names["scaler"].state_dict()["_growth_tracker"] == 2
    at_torch = weights(names)
    exec(back, names)
    for one, two in zip(weights(names), at_torch, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**16, "unskipped": 2}
    steps = {float(state["step"]) for state in names["optimizer"].state_dict()["state"].values()}
    assert steps == {2.0}


@pytest.mark.parametrize("arguments", [{"backoff_factor": 1.0}, {"growth_factor": 1.0}])
def test_a_gradscaler_has_no_static_scale(arguments):
    with pytest.raises(AssertionError):
        torch.amp.GradScaler("cpu", init_scale=128.0, **arguments)


def test_a_gradscaler_refuses_gradients_of_a_model_in_float16():
    model = torch.nn.Linear(2, 1).half()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.ones(1, 2).half()).sum().float()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)
