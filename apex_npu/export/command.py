# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu convert``: shows and converts checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from apex_npu._cli.command_line import Commands, add_command, fail
from apex_npu._cli.tables import show


def _run(options: argparse.Namespace) -> int:
    if (options.to is None) != (options.out is None):
        return fail(options, "--to and --out need each other; without both, the contents are shown")
    if options.strip_module and options.to is None:
        return fail(options, "--strip-module needs --to and --out")
    path, out = Path(options.file), options.out and Path(options.out)
    if out is not None and out.exists() and not out.is_dir() and not options.force:
        return fail(options, f"--out {out}: the file exists; --force replaces it")

    from apex_npu.export.contents import parts_of
    from apex_npu.export.conversion import convert
    from apex_npu.export.files import CheckpointError, read, write

    try:
        checkpoint = read(path)
        if out is None:
            rows = [(part.name, part.describe()) for part in parts_of(checkpoint)]
            show([f"{name}: {what}" for name, what in rows], ("where", "what"), rows)
            return 0
        converted, changes = convert(checkpoint, options.to, strip_module=options.strip_module)
        write(converted, out)
    except (CheckpointError, ImportError, ValueError) as error:
        return fail(options, str(error))
    print("\n".join(changes) or "nothing had to be changed")
    print(f"written: {out}")
    return 0


def add_parser(commands: Commands) -> None:
    """Add the command ``convert``."""
    help = "show what is in a checkpoint, or with --to and --out convert it between apex and torch"
    parser = add_command(commands, "convert", _run, help)
    parser.add_argument("file", metavar="FILE", help="a file of torch.save, .safetensors, or an index of shards")
    to = "the format of NEW: apex, which apex_npu loads as well, or torch"
    parser.add_argument("--to", choices=["apex", "torch"], help=to)
    parser.add_argument("--out", metavar="NEW", help="the file to write")
    strip = "remove the prefixes of DistributedDataParallel and torch.compile from the names"
    parser.add_argument("--strip-module", action="store_true", help=strip)
    parser.add_argument("--force", action="store_true", help="replace NEW if it exists")
