# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run a script under ``run --device npu`` if its first statement is ``import apex_npu.transfer``.

The process is replaced by ``python -m apex_npu run --device npu``, with the interpreter's options and the script's
arguments; nothing is patched. In the new process, and in the processes that the script spawns, the import does nothing.

Raises:
    RuntimeError: There is no script to start (a REPL, a notebook, ``python -c``), or the import is not its first
        statement. The message says what to call instead.

Example::

    import apex_npu.transfer  # noqa: F401

    import torch

    x = torch.ones(2).cuda()  # on npu:0
"""

from apex_npu.migrate.run.transferring import transfer

transfer()
