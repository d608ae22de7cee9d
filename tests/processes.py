# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts several Python processes that train together, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
# For what waits for other processes, in seconds. It ends those that hang, and decides no test: a machine that is busy
# with other things takes many times as long as one that is not.
HANG_TIMEOUT = 900
# Of what waits for a process that has failed already.
GRACE = 60
_RESULT = "result: "


def start(
    worker: Path, checks: tuple[str, ...], processes: int, store: Path, **environment: str
) -> list[subprocess.Popen]:
    """``worker CHECK...`` in ``processes`` processes, which meet at the file ``store``."""
    common = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "STORE": str(store),
        "WORLD_SIZE": str(processes),
        **environment,
    }
    command = [sys.executable, "-W", "ignore", str(worker), *checks]
    return [
        subprocess.Popen(
            command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(processes)
    ]


def finish(started: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """The exit status and the output of each; none is left running.

    Once one has failed, the others, which may wait for it, have ``GRACE`` seconds to say so. What hangs is killed.
    """
    deadline = time.monotonic() + HANG_TIMEOUT
    running = started
    try:
        while running and time.monotonic() < deadline:
            running = [process for process in running if not ends(process, within=0.1)]
            if any(process.returncode for process in started):
                deadline = min(deadline, time.monotonic() + GRACE)
    finally:
        outputs = finish_by_force(started)
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def ends(process: subprocess.Popen, within: float) -> bool:
    """Read what ``process`` prints for ``within`` seconds, or until its end."""
    try:
        process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        return False
    return True


def finish_by_force(started: list[subprocess.Popen]) -> list[str]:
    """End all that still run; what each has printed."""
    for process in started:
        process.kill()
    return [process.communicate()[0] for process in started]


def join(*, like_torchrun: bool = False) -> int:
    """Join the group of the processes that ``start`` has started; the rank of this one, which computes by one thread.

    With ``like_torchrun`` it has its variables, and each process a device of its own.
    """
    import torch
    from devices import DEVICE, communication_backend
    from torch import distributed

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = communication_backend(rank, world)
    if like_torchrun:
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="localhost")
        if DEVICE.type == "npu":
            torch.npu.set_device(rank)
    use_one_thread_per_group()
    store = distributed.FileStore(os.environ["STORE"], world)
    timeout = timedelta(seconds=HANG_TIMEOUT)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return rank


def use_one_thread_per_group() -> None:
    """Make each group of gloo run its collectives by one thread.

    torch starts two, which assign to one string without a lock (``pgStatus_->lastCompletedWorkName`` in
    ``ProcessGroupGloo::runLoop``). Where a reduction and a gather end at the same time, as under ``fully_shard``, one
    of the threads may write to memory that the other has freed: the process ends by SIGSEGV, once in some ten runs
    on a machine that is busy.
    """
    from torch.distributed import ProcessGroupGloo

    init = ProcessGroupGloo.__init__

    # torch 2.14 also gives enable_reconfigure, which is False.
    def init_with_one_thread(group: Any, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        init(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init_with_one_thread  # type: ignore[method-assign]


def leave() -> None:
    """The end of a worker, without the interpreter's.

    gloo's threads outlive the group where something refers to it, as torch.distributed.nn does. A thread that frees a
    reduction of a backward needs Python's lock, and while the interpreter exits that ends the process by SIGABRT
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    from torch import distributed

    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def tell(name: str, *result: Any) -> None:
    """Have ``results_of`` of the process that has started this one return ``result``, by way of JSON."""
    print(_RESULT + json.dumps([name, *result]), flush=True)


def results_of(worker: Path) -> dict[str, list[list[Any]]]:
    """By the names that two processes of ``worker`` tell: what each has told."""
    found: dict[str, list[list[Any]]] = {}
    for line in chain.from_iterable(map(str.splitlines, run(worker))):
        if line.startswith(_RESULT):
            name, *result = json.loads(line.removeprefix(_RESULT))
            found.setdefault(name, []).append(result)
    return found


def run(worker: Path, *checks: str, processes: int = 2, **environment: str) -> list[str]:
    """Run ``worker CHECK...`` in several processes, all of which have to succeed.

    Returns:
        What each has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = finish(start(worker, checks, processes, Path(folder) / "store", **environment))
    statuses, outputs = zip(*results, strict=True)
    assert not any(statuses), "\n".join([f"exit statuses {statuses}", *outputs])
    return list(outputs)
