# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``find_overflow``: a context that reports why the steps inside it are skipped."""

from __future__ import annotations

from torch import nn

from apex_npu.amp.inspect import leave, observe, policy
from apex_npu.debug.overflow.finder import Finder
from apex_npu.debug.overflow.replay import Replayer
from apex_npu.debug.overflow.report import Overflows
from apex_npu.debug.watching.opening import WatchingContext


class find_overflow(WatchingContext):
    """A context that finds out why the steps of the iterations inside it are skipped.

    It examines every operator of forward and backward, which takes 1.2 to four times as long as the iteration alone.
    It does not change the results of the iteration, nor which steps are skipped. ``print(found)`` shows for each cause
    the operator, the module, the line of code, the reason and the remedy.

    With ``replay=True`` it keeps what each forward of the models is computed from, until the step. It runs a skipped
    step again from this, and watches it then. The report says whether the gradients are those of the skipped step. Code
    after the models, such as a loss function, is not run again, unless it is a module that is passed with them.

    Args:
        models: The models whose modules and parameters are named; by default those passed to ``amp.initialize``.
        replay: Watch only skipped steps, while they are run again.

    Returns:
        From ``with``: an ``Overflows`` with ``causes``, ``parameters``, ``loss``, ``scale``, ``reports`` and
        ``to_json(path)``.

    Raises:
        TypeError: One of ``models`` is not a module.
        ValueError: No model is given, and amp has none; or another ``find_overflow`` is open.
        RuntimeError: A CUDA graph is being captured, whose operators the host cannot examine; or ``replay=True`` is
            used before ``amp.initialize``.

    Example::

        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> with amp.debug.find_overflow(model) as found:
        ...     loss = model(torch.randn(8, 4) * 1e6).mean()
        ...     with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...         scaled_loss.backward()
        ...     optimizer.step()
        >>> found.causes[0].kind
        'overflow'
    """

    def __init__(self, *models: nn.Module, replay: bool = False) -> None:
        """Check the models."""
        super().__init__(models)
        self._replay = replay

    def __enter__(self) -> Overflows:
        if self._replay and policy() is None:
            raise RuntimeError("find_overflow(replay=True) repeats steps of amp: call amp.initialize first")
        models = self.models_to_watch()
        finder = Replayer() if self._replay else Finder(models)
        self._finder: Finder | Replayer = finder
        observe(finder)
        if isinstance(finder, Replayer):
            finder.follow(models)
        else:
            finder.stream.attach()
        return finder.found

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        leave(self._finder)
        if isinstance(self._finder, Replayer):
            self._finder.detach()
        else:
            self._finder.stream.detach()
            self._finder.examine_rest(interrupted=kind is not None)
