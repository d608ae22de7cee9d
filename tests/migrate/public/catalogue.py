# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data: the scripts, at a commit each, and how they are started on little data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_EXAMPLES = ("pytorch/examples", "37a1866d0e0118875d52071756f76b9b3e46c565")
_APEX = ("NVIDIA/apex", "eae1ddf1f3982c41632fe332a04b0d41953d5234")


@dataclass(frozen=True, eq=False)
class Script:
    """A program of a public repository.

    Attributes:
        name: Its name here.
        repository: The owner and name of the repository.
        commit: What is taken of it.
        paths: The files and folders that are taken.
        folder: Where it is started, below the repository.
        command: The script and its arguments; ``{port}`` is a free port, ``{rank}`` that of a process.
        amp: Levels that ``--amp`` puts in.
        processes: How many are started.
        ranks: How many write losses, which are more where the script spawns processes.
        steps: After how many backward passes it is stopped.
        environment: For each process, further variables.
        prepare: Makes data in the folder.
        needs: Packages beside torch, as pip names them, with the versions that it works with.
        knows_apex: Whether it imports apex: its original runs under ``apex_npu run``.
    """

    name: str
    repository: str
    commit: str
    paths: tuple[str, ...]
    folder: str
    command: tuple[str, ...]
    amp: tuple[str, ...] = ()
    processes: int = 1
    ranks: int = 1
    steps: int = 4
    environment: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda folder: None
    needs: tuple[str, ...] = ()
    knows_apex: bool = False


def _examples(name: str, *command: str, **more: object) -> Script:
    path = name.partition("_of_")[0]
    return Script(name, *_EXAMPLES, (path,), path, ("main.py", *command), **more)  # type: ignore[arg-type]


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names.split())


def _tokens(folder: Path) -> None:
    data = folder / "data/tiny"
    data.mkdir(parents=True)
    for part in ("train", "val"):
        np.random.RandomState(1).randint(0, 64, 4_000).astype(np.uint16).tofile(data / f"{part}.bin")


def _ratings(folder: Path) -> None:
    lines = [
        f"{user}::{100 + item}::{1 + item % 5}::{item}" for user in range(30) for item in range(6 * user, 6 * user + 6)
    ]
    folder.joinpath("data/ml-1m").mkdir(parents=True)
    folder.joinpath("data/ml-1m/ratings.dat").write_text("\n".join([*lines, ""]))
    folder.joinpath("checkpoints").mkdir()


def _sentences(folder: Path) -> None:
    letters, random = [chr(0x4E00 + number) for number in range(200)], np.random.RandomState(1)
    folder.joinpath("THUCNews/saved_dict").mkdir()
    for part in ("train", "dev", "test"):
        lines = ["".join(random.choice(letters, 12)) + f"\t{number % 10}" for number in range(128)]
        folder.joinpath(f"THUCNews/data/{part}.txt").write_text("\n".join(lines), encoding="utf-8")


_DCGAN = ("--dataset", "fake", "--cuda", "--ngf", "8", "--ndf", "8", "--batchSize", "8", "--manualSeed", "1")
_IMAGENET = ("--dummy", "-a", "resnet18", "-j", "0", "-p", "1", "-b", "8", "--seed", "1", "--epochs", "1")
_TCP = ("--dist-url", "tcp://127.0.0.1:{port}")
_NANO_GPT = {
    **{"dataset": "tiny", "max_iters": 5, "eval_interval": 100, "eval_iters": 1, "batch_size": 4, "block_size": 32},
    **{"n_layer": 2, "n_head": 2, "n_embd": 32, "gradient_accumulation_steps": 1, "compile": False, "dtype": "float32"},
}
_ENV = {
    "WORLD_SIZE": "2",
    "RANK": "{rank}",
    "LOCAL_RANK": "{rank}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
}
_APEX_IMAGENET = (
    *("main_amp.py", ".", "-j", "0", "-p", "1", "-b", "8"),
    *("--epochs", "1", "--deterministic", "--opt-level"),
)

SCRIPTS = (
    _examples("mnist", "--epochs", "1", "--batch-size", "8", "--test-batch-size", "16", amp=("O1",)),
    _examples("dcgan", *_DCGAN, amp=("O1",)),
    _examples("vae", "--epochs", "1", "--batch-size", "8", amp=("O1",)),
    _examples("siamese_network", "--epochs", "1", "--batch-size", "8", "--test-batch-size", "16", amp=("O1",)),
    _examples("imagenet", *_IMAGENET, "--gpu", "0", amp=("O1",)),
    _examples(
        "imagenet_of_two_processes",
        *(*_IMAGENET, *_TCP, "--gpu", "{rank}", "--rank", "{rank}", "--world-size", "2"),
        processes=2,
        ranks=2,
        amp=("O1",),
    ),
    _examples(
        "imagenet_of_spawned_processes",
        *(*_IMAGENET, *_TCP, "--multiprocessing-distributed", "--world-size", "1", "--rank", "0"),
        ranks=2,
        amp=("O1",),
    ),
    Script(*("apex_imagenet_O0", *_APEX, ("examples",), "examples/imagenet", (*_APEX_IMAGENET, "O0")), knows_apex=True),
    Script(
        *("apex_imagenet_O2", *_APEX, ("examples",), "examples/imagenet"),
        (*_APEX_IMAGENET, "O2", "--loss-scale", "128.0"),
        knows_apex=True,
    ),
    Script(
        *("apex_simple_distributed", *_APEX, ("examples",), "examples/simple/distributed"),
        ("distributed_data_parallel.py", "--local_rank", "{rank}"),
        processes=2,
        ranks=2,
        environment=_ENV,
        knows_apex=True,
    ),
    Script(
        *("nanoGPT", "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
        (*_files(".", "bench configurator model sample train"), "config"),
        ".",
        ("train.py", *(f"--{name}={value}" for name, value in _NANO_GPT.items())),
        prepare=_tokens,
    ),
    Script(
        *("neural_collaborative_filtering", "yihong-chen/neural-collaborative-filtering"),
        *("e6cfeb4e4e1ae676bc291b97fc18ce157358a087", _files("src", "data engine gmf metrics mlp neumf train utils")),
        *("src", ("train.py",)),
        prepare=_ratings,
        needs=("pandas<3",),  # it assigns through a selection, which later ones copy
        amp=("O1",),
    ),
    Script(
        *("chinese_text_classification", "649453932/Chinese-Text-Classification-Pytorch"),
        "6cb26819af7b646275aff8a4693676f2849e67f6",
        (*_files(".", "run train_eval utils utils_fasttext"), "models", "THUCNews/data/class.txt"),
        ".",
        ("run.py", "--model", "TextCNN", "--embedding", "random"),
        prepare=_sentences,
        needs=("scikit-learn", "tqdm"),
    ),
)
