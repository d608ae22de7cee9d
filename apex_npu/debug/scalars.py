# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``scalars``: the numbers of amp that a tracker logs."""

from __future__ import annotations

from apex_npu.amp import last_step, state_dict
from apex_npu.amp.inspect import optimizers, require
from apex_npu.debug.gradient_range.report import GradientRange


def scalars(gradients: GradientRange | None = None) -> dict[str, float]:
    """Return the loss scales and the counts of skipped steps, for TensorBoard, trackio or wandb.

    The call waits for the device only if the host does not know yet whether the last step was skipped.

    Args:
        gradients: A result of ``gradient_range``, whose shares are added: ``amp/gradients_zero``,
            ``amp/gradients_lossy``, ``amp/gradients_not_finite``, and with ``probe`` ``amp/gradients_lost``.

    Returns:
        A dict with ``amp/loss_scale0`` and so on for each loss, ``amp/skipped_steps`` (the sum over all optimizers) and
        ``amp/skips_in_a_row`` (the maximum over all optimizers).

    Raises:
        RuntimeError: amp has not been initialized.
        TypeError: ``gradients`` is not a ``GradientRange``.

    Example::

        >>> optimizer = optimizers.NpuFusedAdam(model.parameters(), lr=1e-3)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic")
        >>> amp.debug.scalars()
        {'amp/loss_scale0': 65536.0, 'amp/skipped_steps': 0.0, 'amp/skips_in_a_row': 0.0}
    """
    require("scalars")
    if gradients is not None and not isinstance(gradients, GradientRange):
        raise TypeError(f"gradients must be a result of gradient_range, got {type(gradients).__name__}")
    found = {f"amp/loss_scale{i}": float(loss["loss_scale"]) for i, loss in enumerate(state_dict().values())}
    reports = [report for optimizer in optimizers() if (report := last_step(optimizer)) is not None]
    found["amp/skipped_steps"] = float(sum(report.skipped_steps for report in reports))
    found["amp/skips_in_a_row"] = float(max((report.skips_in_a_row for report in reports), default=0))
    return {**found, **({} if gradients is None else gradients.shares())}
