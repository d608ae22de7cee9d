# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex_npu convert``: shows and converts checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apex_npu._cli.command_line import Argument, Command
from apex_npu._cli.tables import show


def _run(options: argparse.Namespace) -> int:
    if (options.to is None) != (options.out is None):
        return _fail("--to and --out belong together; without either the contents are shown")
    if options.strip_module and options.to is None:
        return _fail("--strip-module belongs to --to and --out")
    path, out = Path(options.file), options.out and Path(options.out)
    if out is not None and not out.parent.is_dir():
        return _fail(f"--out {out}: there is no folder {out.parent}")
    if out is not None and out.exists() and not out.is_dir() and not options.force:
        return _fail(f"--out {out}: the file exists; --force replaces it")

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
        return _fail(str(error))
    print("\n".join(changes) or "nothing had to be changed")
    print(f"written: {out}")
    return 0


def _fail(reason: str) -> int:
    print(f"apex_npu convert: {reason}", file=sys.stderr)
    return 2


CONVERT = Command(
    "convert",
    "show what is in a checkpoint, or with --to and --out convert it between apex and torch",
    _run,
    (
        Argument("file", "a file of torch.save, .safetensors, or an index of shards", metavar="FILE"),
        Argument("--to", "whose form NEW gets: apex's, which apex_npu loads as well, or torch's", metavar="apex|torch"),
        Argument("--out", "the file to write", metavar="NEW"),
        Argument(
            "--strip-module", "take the prefixes of DistributedDataParallel and torch.compile off the names", flag=True
        ),
        Argument("--force", "replace NEW where it exists", flag=True),
    ),
    usage=("FILE", "FILE --to torch --out NEW"),
)
