# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu.compat.pipeline``, and what ``scripts/*.sh`` run; see ``commands.py``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from apex_npu._cli.command_line import parse

from .commands import COMMANDS


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Run what ``arguments`` say.

    Returns:
        The exit status: 0, 1 after a refusal, 130 after Ctrl-C; argparse exits with 2 itself.
    """
    options = parse(COMMANDS, program, "Patches checkouts of NVIDIA's Apex.", arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
