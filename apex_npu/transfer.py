# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``import apex_npu.transfer``, a script's first statement, runs the script under ``run --device npu``.

The process is replaced by ``python -m apex_npu run --device npu``, with the interpreter's options and the script's
arguments; nothing is patched. There the import does nothing, as in the processes that the script spawns.

Raises:
    RuntimeError: There is no script to start (a REPL, a notebook, ``python -c``), or the import is not its first
        statement; the text says what to call instead.

Example::

    import apex_npu.transfer  # noqa: F401

    import torch

    x = torch.ones(2).cuda()  # on npu:0
"""

from apex_npu.migrate.run.transferring import transfer

transfer()
