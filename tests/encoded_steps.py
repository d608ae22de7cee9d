# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of optimizers whose states, or parameters, are encoded: eager or of a graph, counted by the host or the device.

Gradients overflow in some of them, and each has a learning rate of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import lockstep
import pytest
import torch
from captures import Capture
from torch import Tensor, nn

from apex_npu import optimizers
from apex_npu.ops import RunEncoding
from apex_npu.ops.reference import bias_correction_of
from apex_npu.optimizers import adamp

RULES: dict[str, tuple[type[optimizers.FusedOptimizer], dict[str, Any]]] = {
    "Adam": (optimizers.NpuFusedAdam, {"amsgrad": True}),
    "AdamW": (optimizers.NpuFusedAdamW, {"weight_decay": 0.1}),
    "SGD": (optimizers.NpuFusedSGD, {"momentum": 0.9, "dampening": 0.3}),
    "RMSprop": (optimizers.NpuFusedRMSprop, {"momentum": 0.9, "centered": True}),
    "RMSpropTF": (optimizers.NpuFusedRMSpropTF, {"momentum": 0.9}),
    "Adadelta": (optimizers.NpuFusedAdadelta, {"weight_decay": 0.1}),
    "Adagrad": (optimizers.FusedAdagrad, {}),
    "FusedAdam": (optimizers.FusedAdam, {"weight_decay": 0.1}),
    "LAMB": (optimizers.NpuFusedLamb, {"weight_decay": 0.1}),
    "FusedLAMB": (optimizers.FusedLAMB, {"max_grad_norm": 1.0}),
    "AdamP": (optimizers.NpuFusedAdamP, {"weight_decay": 0.1, "nesterov": True}),
    "Muon": (optimizers.NpuFusedMuon, {"use_muon": "auto"}),
    "SGD without momentum": (optimizers.NpuFusedSGD, {}),
}
# With those that cannot be captured.
ALL_RULES = RULES | {
    "FusedSGD": (optimizers.FusedSGD, {"momentum": 0.9}),
    "BertAdam": (optimizers.NpuFusedBertAdam, {"max_grad_norm": 1.0}),
    "NovoGrad": (optimizers.FusedNovoGrad, {"weight_decay": 0.1}),
}
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "stochastic": (torch.bfloat16, {"state_dtype": "int8", "stochastic_rounding": True}),
    "remainders": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "int8 remainders": (torch.float16, {"state_dtype": "int8"}),
}
# With each rule, and each format.
SOME = [(rule, list(FORMATS)[i % len(FORMATS)]) for i, rule in enumerate(RULES)]
SOME[-1] = ("SGD without momentum", "stochastic")  # the only format that it has
STEPS, CAPTURED, OVERFLOWS = 7, 3, (0, 1, 4)
APPLIED = STEPS - len(OVERFLOWS)
_SCALE = 4.0


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """Three, the last of them transposed in memory."""
    made = lockstep.make_params([(37, 9), (5,), (64, 33)], dtype, seed)
    made[2].data = made[2].data.t()
    return made


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Training:
    """The parameters and the optimizer of a run on ``device``."""

    def __init__(self, rule: str, form: str, device: torch.device, *, capturable: bool) -> None:
        dtype, formats = FORMATS[form]
        self.params = lockstep.make_params([(37, 9), (5,), (20, 33)], dtype, device=device)
        cls, options = RULES[rule]
        self.optimizer = cls(self.params, **options, **formats, capturable=capturable)
        if form.endswith("remainders"):
            kept = torch.int8 if form.startswith("int8") else torch.int16
            self.optimizer.state_formats = self.optimizer.state_formats.with_remainders(kept)
        self.optimizer.grad_scale = torch.tensor([_SCALE], device=device)
        self._found_inf = self._lr = None
        if capturable:
            self._found_inf, self._lr = torch.zeros(1, device=device), torch.zeros((), device=device)
            self.optimizer._step_supports_amp_scaling = True
            self.optimizer.found_inf = self._found_inf

    def step(self, index: int, do: Callable[[], object] | None = None) -> None:
        """The step ``index``, by ``do`` in the place of the optimizer's own. One that counts on the host skips some."""
        overflows = index in OVERFLOWS
        generator = torch.Generator().manual_seed(index)
        for p in self.params:
            grad = torch.randn(p.shape, generator=generator).mul_(_SCALE).to(p.dtype)
            if overflows:
                grad.view(-1)[-1] = torch.inf
            if p.grad is None:
                p.grad = grad.to(p.device)
            else:
                p.grad.copy_(grad)
        lr = torch.tensor(1e-3 * (index + 1))
        if self._lr is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr.item()
        else:
            self._lr.copy_(lr)
            self._found_inf.fill_(float(overflows))
            for group in self.optimizer.param_groups:
                group["lr"] = self._lr
        if self._lr is not None or not overflows:
            (do or self.optimizer.step)()

    def run(self, begin: int = 0, do: Callable[[], object] | None = None) -> Training:
        """All steps from ``begin`` on."""
        for index in range(begin, STEPS):
            self.step(index, do)
        return self

    def run_captured(self, capture: Callable[[Callable[[], object]], Callable[[], object]]) -> Training:
        """The same in which those from ``CAPTURED`` on are replays of what ``capture`` returns, given a step."""
        for index in range(CAPTURED):
            self.step(index)
        replay: list[Callable[[], object]] = []

        def captured() -> None:
            replay.append(capture(self.optimizer.step))
            replay[0]()

        self.step(CAPTURED, captured)
        return self.run(CAPTURED + 1, replay[0])

    def values(self) -> dict[str, Tensor]:
        """Parameters, and states as they are decoded, by name."""
        found = {f"parameter {i}": p.detach().clone() for i, p in enumerate(self.params)}
        for i, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{name} {i}": value for name, value in entry.items() if name != "applied_steps"}
        return found

    def counts(self) -> list[float]:
        """How many steps each parameter has been given."""
        return [float(state["step"]) for state in self.optimizer.state.values() if "step" in state]


def cases(quick: Container[tuple[str, str]] = SOME) -> pytest.MarkDecorator:
    """Each rule with each format; those that are not ``quick`` are sweeps."""
    found = [(rule, form) for rule in RULES for form in FORMATS]
    marked = [pytest.param(*case, marks=[] if case in quick else pytest.mark.sweep) for case in found]
    return pytest.mark.parametrize(("rule", "form"), marked)


def simulated(step: Callable[[], object]) -> Callable[[], object]:
    """A simulated capture of ``step``."""
    with Capture() as graph:
        step()
    return graph.replay


def assert_same_bits(found: Training, expected: Training) -> None:
    """Of parameters and states."""
    values, wanted = found.values(), expected.values()
    assert values.keys() == wanted.keys()
    differ = [name for name, value in values.items() if not torch.equal(value, wanted[name].to(value))]
    assert not differ, f"the bits of {differ} differ"


def compute_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have counts and learning rates of the host be tensors in the arithmetic of rules, in which their bits may differ.

    Random bits are drawn with the count of the host all the same.
    """
    decode_and_run = RunEncoding.decode_and_run

    def moved(encoding: RunEncoding, kernel: Any, names: Any, operands: Any, options: Any, **more: Any) -> None:
        numbers = {name: torch.tensor(float(options[name]), device=device) for name in {"lr", "step"} & options.keys()}
        decode_and_run(encoding, kernel, names, operands, {**options, **numbers}, **more)

    monkeypatch.setattr(RunEncoding, "decode_and_run", moved)

    # AdamP's arithmetic is torch's.
    def moved_rate(optimizer: optimizers.NpuFusedAdamP, run: object, group: dict[str, Any]) -> Tensor:
        return torch.tensor(group["lr"], device=device)

    def moved_correction(beta: float, step: int) -> float | Tensor:
        return bias_correction_of(beta, torch.tensor(float(step), device=device))

    monkeypatch.setattr(optimizers.NpuFusedAdamP, "learning_rate", moved_rate)
    monkeypatch.setattr(adamp, "bias_correction_of", moved_correction)
