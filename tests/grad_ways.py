# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How gradients of the small models of tests wait for the step: as those of models of any size do, on any device."""

import importlib
import math
import sys

import pytest
import torch
from devices import DEVICE

from apex_npu._extension import extension
from apex_npu.fusion import FlatGrads, flat_grads, grad_memory, grad_slots
from apex_npu.fusion.flat_buffer import FlatBuffer
from apex_npu.ops import gather

# Those that this device has, beside ``gathered``: in slots, as small ones are.
WAYS = {
    "cpu": ("left", "aliased", "addressed", "lent"),
    "cuda": ("aliased", "addressed", "lent"),
}.get(DEVICE.type, ("joined", "lent"))


def use(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have all gradients wait in this way.

    Args:
        monkeypatch: Undoes it.
        way: ``gathered``; ``left`` where backward has put them; ``joined`` in a 16-bit copy; ``aliased``, read in place
            by a table of addresses; ``addressed``, gathered by such a table; ``lent``, which own the memory of slots.
    """
    if way != "gathered" and extension is None:
        pytest.skip("without the extension gradients are gathered")
    stays = way in ("left", "aliased", "joined")
    if way in ("aliased", "addressed", "lent"):
        _take_addresses(monkeypatch)
    monkeypatch.setattr(FlatGrads, "gathers_all", not stays)
    monkeypatch.setattr(grad_slots, "WRITTEN_NUMEL", 0 if way == "left" else sys.maxsize)
    monkeypatch.setattr(grad_memory, "LENT_NUMEL", 0 if way in ("joined", "lent") else 1 << 23)
    if way == "lent":
        monkeypatch.setattr(grad_memory, "may_lend", lambda slot: True)
        renew = FlatBuffer.renew

        def poisoned(buffer: FlatBuffer) -> None:
            renew(buffer)
            buffer.flat.fill_(math.nan)  # new memory holds anything

        monkeypatch.setattr(FlatBuffer, "renew", poisoned)


def _take_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels of Triton's, which a CPU interprets."""
    if DEVICE.type == "cpu":
        importlib.import_module("triton_interpreter").mend(monkeypatch)  # or it skips
        for module in (flat_grads, gather):
            monkeypatch.setattr(module, "takes_addresses", lambda slot: True)
        monkeypatch.setattr(flat_grads, "gathers_in_one_pass", lambda slot: False)
    elif DEVICE.type == "cuda" and not gather.takes_addresses(torch.zeros((), device=DEVICE)):
        pytest.skip("without Triton there are no tables of addresses")
