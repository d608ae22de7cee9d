# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A reference to a process group that does not keep the group alive."""

from __future__ import annotations

import weakref
from typing import Any


class GroupReference:
    """A weak reference to a process group: ``reference()`` returns the group.

    ``torch.distributed.destroy_process_group`` ends a group's threads, and frees its communicators, when nothing refers
    to the group any more. A gloo thread that outlives the call ends the process by SIGABRT if it frees a reduction
    while the interpreter exits (https://github.com/pytorch/pytorch/issues/190489).
    """

    def __init__(self, group: Any, argument: str) -> None:
        """Refer to ``group``, which was given to ``amp.initialize`` as ``argument``."""
        self._reference = weakref.ref(group)
        self._argument = argument

    def __call__(self) -> Any:
        """Return the group.

        Raises:
            RuntimeError: The group has been destroyed.
        """
        group = self._reference()
        if group is None:
            raise RuntimeError(
                f"the process group that amp.initialize was given as {self._argument} has been destroyed, and backward "
                "needs it; call torch.distributed.destroy_process_group() after the last step, or amp.initialize again "
                "with the new group"
            )
        return group
