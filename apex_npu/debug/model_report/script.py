# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``FirstForward``: prints the report of ``python -m apex_npu run --model-report`` at a script's first forward."""

from __future__ import annotations

from dataclasses import fields, replace
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from apex_npu.amp import inspect
from apex_npu.amp.policy import Policy, resolve
from apex_npu.autocast.cast_policy import CastPolicy
from apex_npu.debug.model_report.report import LEVELS, report
from apex_npu.debug.watching.opening import is_of_amp
from apex_npu.distributed.rank_progress import is_first_rank


class FirstForward:
    """A hook that reports on the first model passed to ``amp.initialize`` that is called for training."""

    def __init__(self) -> None:
        """Begin to wait for that call."""
        hook = torch_module.register_module_forward_hook(self._forward_ended, with_kwargs=True)
        self._remove = hook.remove
        self._exit = Finalize(None, self._script_ended, exitpriority=0)  # as in ScriptSteps

    def _forward_ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Report after the forward, so that tensors in the model's caches have values."""
        policy = inspect.policy()
        if torch.compiler.is_compiling() or policy is None or not policy.enabled:
            return
        if torch.is_grad_enabled() and is_of_amp(module):
            self.end()
            if is_first_rank():
                self._report(policy, module, args, kwargs)

    def _report(self, policy: Policy, module: nn.Module, args: Any, kwargs: Any) -> None:
        level = policy.opt_level
        plain = resolve(level)
        overrides = {
            name: getattr(policy, name)
            for name in (*(field.name for field in fields(CastPolicy)), "master_weights")
            if getattr(policy, name) != getattr(plain, name)
        }
        levels: list[str | Policy] = [*LEVELS, level]
        trains = f"the script trains at {level}"
        if overrides:
            own = replace(plain, opt_level=f"{level}*", **overrides)
            levels.append(own)
            trains += f" with {', '.join(f'{name}={value}' for name, value in overrides.items())}: {own.opt_level}"
        try:
            found = report(module, *args, levels=levels, kwargs=kwargs)
        except Exception as error:  # the script goes on, and may show why
            print(f"--model-report: {type(error).__name__}: {error}", flush=True)
            return
        found.notes.append(trains)
        print(found, flush=True)

    def _script_ended(self) -> None:
        self.end()
        if is_first_rank() and (inspect.policy() is not None or parent_process() is None):
            print(
                "--model-report: the script has ended before a model of amp.initialize was called for training, "
                "outside of compiled functions, in this process",
                flush=True,
            )

    def end(self) -> None:
        """Stop waiting for calls."""
        self._exit.cancel()
        self._remove()
