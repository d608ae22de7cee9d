# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The frameworks' own training scripts, with the line of the integration in them: losses beside the framework's.

``python tests/integrations/public_scripts.py [NAME[:WAY,...]...]`` prints the table. ``HOST_SCRIPTS`` names a folder of
clones, ``OWNER/NAME`` each, bare or not. Data sets are generated: the lines that would download one are replaced.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLONES = "HOST_SCRIPTS"
ROOT = Path(__file__).parents[2]

Edit = tuple[str, str]


@dataclass(frozen=True)
class Way:
    """One way to train with a script.

    Attributes:
        edits: Texts of it that are replaced.
        arguments: Of its command line.
        device: "cpu", or "npu" for what it asks of CUDA, on the simulated NPU.
    """

    edits: tuple[Edit, ...] = ()
    arguments: tuple[str, ...] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        repository: OWNER/NAME; or the name of an installed package that has the script.
        revision: Of the repository; "" for a package.
        path: Of the script.
        beside: Other files that it imports.
        data: The edits that have it generate its data.
        prepare: Makes data in the folder that it is started in.
        arguments: Of its command line, in all ways.
        host: What ``apex_npu run --host`` registers.
        losses: Reads them from that folder, or from what it has printed.
        ways: The framework's own first: full precision, half precision; then amp's levels.
        needs: Modules.
        compared: How many losses are to be near those of full precision; later ones follow skipped steps, or differ by
            rounding that has grown.
    """

    repository: str
    revision: str
    path: str
    losses: Callable[[Path, str], list[float]]
    ways: dict[str, Way]
    beside: tuple[str, ...] = ()
    data: tuple[Edit, ...] = ()
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    arguments: tuple[str, ...] = ()
    host: str | None = None
    needs: tuple[str, ...] = ()
    compared: int | None = None


# --------------------------------------------------------------------------------------------------------- their data

GENERATED = '''
import torch
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_pil_image

class Images(Dataset):
    """In place of CIFAR: the class of an image is its brightest corner."""
    def __init__(self, root=None, train=True, transform=None, download=False):
        self.transform, self.count = transform, 48 if train else 8
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(i)) * 0.5
        label = i % 4
        image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 0.5
        return self.transform(to_pil_image(image)), label
'''


def write_images(folder: Path) -> None:
    """As files, in a folder for each class."""
    import numpy
    from PIL import Image

    numbers = numpy.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for label in range(3):
            made = folder / "images" / split / f"class{label}"
            made.mkdir(parents=True)
            for i in range(count):
                image = numbers.integers(0, 120, (48, 48, 3))
                image[..., label] += 100
                Image.fromarray(image.astype("uint8")).save(made / f"{i}.png")


def write_words(folder: Path) -> None:
    """A text in which each word follows from the one before, nearly always."""
    import random

    numbers, word, words = random.Random(0), 0, []
    for _ in range(35 * 4162):
        word = (word * 7 + 3) % 50 if numbers.random() < 0.9 else numbers.randrange(50)
        words.append(f"word{word}")
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(" ".join(words))


def write_language(folder: Path) -> None:
    """A model for trl, its tokenizer, and sentences in which each word follows from the one before."""
    import random

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

    names = ["<end>", *(f"word{i}" for i in range(50))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder / "model")
    set_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=51, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=0, **off)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    numbers = random.Random(0)
    (folder / "text").mkdir()
    with (folder / "text" / "train.jsonl").open("w") as file:
        for _ in range(64):
            sentence = [numbers.randrange(50)]
            while len(sentence) < 24:
                sentence.append((sentence[-1] * 7 + 3) % 50)
            print(json.dumps({"text": " ".join(f"word{word}" for word in sentence)}), file=file)


def write_text(folder: Path) -> None:
    """The same for transformers' script: a configuration, a tokenizer, and a text."""
    write_language(folder)
    sentences = [json.loads(line)["text"] for line in (folder / "text" / "train.jsonl").read_text().splitlines()]
    (folder / "train.txt").write_text("\n".join(sentences))


def write_generated(folder: Path) -> None:
    (folder / "generated.py").write_text(GENERATED)


# ------------------------------------------------------------------------------------------------------- their losses


def printed(pattern: str) -> Callable[[Path, str], list[float]]:
    return lambda folder, output: [float(found) for found in re.findall(pattern, output)]


def of_lightning(folder: Path, output: str) -> list[float]:
    with next(folder.glob("lightning_logs/version_*/metrics.csv")).open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]


# ---------------------------------------------------------------------------------------------------------- the scripts


def of_trainer(options: str) -> Way:
    short = "max_steps=10, log_every_n_steps=1, limit_val_batches=1, limit_test_batches=1, accelerator='cpu', "
    short += "logger=L.pytorch.loggers.CSVLogger('.'), "
    return Way(
        edits=(
            (
                "L.Trainer(gradient_clip_val=0.25, max_epochs=20)",
                f"L.Trainer(gradient_clip_val=0.25, {short}{options})",
            ),
        )
    )


def apex_plugin(level: str) -> str:
    return f"plugins=__import__('apex_npu.integrations.lightning').integrations.lightning.ApexAmpPrecision({level!r})"


def with_trainer(train: str) -> dict[str, Way]:
    """The ways of a script that has the text ``train``, and whose last argument is the value of --bf16."""
    ways = {"fp32": Way(arguments=("False",)), "bf16": Way(arguments=("True",))}
    for level in ("O1", "O2", "O4", "O5"):
        with_amp = train.replace("trainer.", f"{USE_AMP}(trainer, {level!r}).")
        ways[level] = Way(edits=((train, with_amp),), arguments=("False",))
    return ways


def of_runner(wrapper: str = "", device: str = "npu") -> Way:
    begin = "optim_wrapper=dict("
    return Way(edits=((begin + "optimizer", begin + wrapper + "optimizer"),) if wrapper else (), device=device)


TIMM = (
    "--data-dir images --num-classes 3 --model test_resnet --img-size 32 --batch-size 16 --workers 0 --epochs 2 "
    "--log-interval 1 --opt npufusedsgd --lr 0.05 --no-aug --warmup-epochs 0 --sched step --seed 1"
)
OF_TRAINER = (
    "--output_dir out --max_steps 10 --per_device_train_batch_size 8 --logging_steps 1 --learning_rate 1e-2 "
    "--report_to none --save_strategy no --use_cpu True --bf16"
)
TRL = f"--model_name_or_path model --dataset_name text --dtype float32 --max_length 32 {OF_TRAINER}"
RUN_CLM = (
    "--config_name model --tokenizer_name model --train_file train.txt --block_size 32 --do_train --seed 0 "
    f"{OF_TRAINER}"
)
USE_AMP = "__import__('apex_npu.integrations.transformers').integrations.transformers.use_amp"

SCRIPTS = {
    "trl": Script(
        "trl",
        "",
        "scripts/sft.py",
        printed(r"'loss': '?([\d.]+)"),
        with_trainer("    trainer.train("),
        prepare=write_language,
        arguments=tuple(TRL.split()),
        needs=("trl", "transformers", "datasets"),
    ),
    "transformers": Script(
        "huggingface/transformers",
        "v4.48.0",
        "examples/pytorch/language-modeling/run_clm.py",
        printed(r"'loss': '?([\d.]+)"),
        with_trainer("= trainer.train("),
        data=(  # what newer releases of transformers do not have
            (", send_example_telemetry", ""),
            ('send_example_telemetry("run_clm", model_args, data_args)', "pass"),
            (" and not training_args.overwrite_output_dir", ""),
        ),
        prepare=write_text,
        arguments=tuple(RUN_CLM.split()),
        needs=("transformers", "datasets", "evaluate"),
    ),
    "timm": Script(
        "huggingface/pytorch-image-models",
        "v1.0.20",  # the last one with --amp-impl apex
        "train.py",
        printed(r"Loss: (\d\S*) \("),
        {
            "fp32": Way(arguments=("--device", "cpu")),
            "fp16": Way(arguments=("--device", "cuda", "--amp"), device="npu"),
            "O1": Way(arguments=("--device", "cuda", "--amp", "--amp-impl", "apex"), device="npu"),
        },
        prepare=write_images,
        arguments=tuple(TIMM.split()),
        host="timm",
        needs=("timm", "torchvision"),
    ),
    "Lightning": Script(
        "Lightning-AI/pytorch-lightning",
        "HEAD",
        "examples/pytorch/basics/transformer.py",
        of_lightning,
        {
            "fp32": of_trainer("precision='32'"),
            "bf16": of_trainer("precision='bf16-mixed'"),
            **{level: of_trainer(apex_plugin(level)) for level in ("O1", "O2", "O4", "O5")},
        },
        prepare=write_words,
        needs=("lightning",),
    ),
    "MMEngine": Script(
        "open-mmlab/mmengine",
        "HEAD",
        "examples/distributed_training.py",
        printed(r"  loss: (\S+)"),
        {
            "fp32": of_runner(device="cpu"),
            "bf16": of_runner("type='AmpOptimWrapper', dtype='bfloat16', "),
            **{
                level: of_runner(f"type='ApexOptimWrapper', opt_level={level!r}, loss_scale={scale}, ")
                for level, scale in (("O1", 1024.0), ("O2", 1024.0), ("O4", 1.0), ("O5", 1.0))
            },
        },
        data=(
            ("torchvision.datasets.CIFAR10", "__import__('generated').Images"),
            ("resnet50()", "resnet18()"),
            ("batch_size=32", "batch_size=8"),
            ("max_epochs=2", "max_epochs=1"),
            ("    runner = Runner(", "    __import__('torch').manual_seed(0)\n    runner = Runner("),
            (
                "launcher=args.launcher,",
                "launcher=args.launcher, randomness=dict(seed=0), log_processor=dict(window_size=1), "
                "default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),",
            ),
        ),
        prepare=write_generated,
        host="mmengine",
        needs=("mmengine", "torchvision"),
        compared=4,  # batch norm over 8 images enlarges what is rounded
    ),
    "ignite": Script(
        "pytorch/ignite",
        "HEAD",
        "examples/cifar100_amp_benchmark/benchmark_nvidia_apex.py",
        printed(r"batch loss is (\S+)"),
        {level: Way(arguments=(f"--opt={level}",), device="npu") for level in ("O0", "O1", "O2")},
        beside=("examples/cifar100_amp_benchmark/utils.py",),
        data=(
            ("from torchvision.datasets.cifar import CIFAR100", "from generated import Images as CIFAR100"),
            ("num_workers=12", "num_workers=0"),
            ("wide_resnet50_2", "resnet18"),
            ("        return loss.item()", "        print('batch loss is', loss.item())\n        return loss.item()"),
            (
                "    train_loader, test_loader, eval",
                "    __import__('torch').manual_seed(0)\n    train_loader, test_loader, eval",
            ),
        ),
        prepare=write_generated,
        arguments=("none", "--batch_size=8", "--max_epochs=1"),
        needs=("ignite", "fire", "torchvision"),
        compared=1,  # at the default loss scale its first three steps overflow
    ),
}


# ------------------------------------------------------------------------------------------------------------- running


def why_not(script: Script) -> str:
    """Why it cannot be run here; "": it can."""
    if script.revision and not os.environ.get(CLONES):
        return f"{CLONES} names no folder of clones"
    if script.revision and not Path(os.environ[CLONES], script.repository).is_dir():
        return f"{CLONES} has no {script.repository}"
    needs = (*script.needs, *({"npu_simulator"} if any(way.device == "npu" for way in script.ways.values()) else ()))
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"it needs {', '.join(lacking)}" if lacking else ""


def text_of(script: Script, path: str) -> str:
    """One of its files, of the clone or of the installed package."""
    if not script.revision:
        return Path(
            next(iter(importlib.util.find_spec(script.repository).submodule_search_locations)), path
        ).read_text()
    command = ["git", "-C", str(Path(os.environ[CLONES], script.repository)), "show", f"{script.revision}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def losses_of(script: Script, way: Way, folder: Path) -> list[float]:
    """Run it in an empty ``folder``; what it says where it fails."""
    texts = {path: text_of(script, path) for path in (script.path, *script.beside)}
    for old, new in script.data + way.edits:
        assert any(old in text for text in texts.values()), f"{script.path} has no {old}"
        texts = {path: text.replace(old, new) for path, text in texts.items()}
    for path, text in texts.items():
        (folder / Path(path).name).write_text(text)
    script.prepare(folder)
    simulated = way.device == "npu"
    command = [sys.executable, "-W", "ignore", *(["-m", "npu_simulator"] if simulated else []), "-m", "apex_npu", "run"]
    command += ["--host", script.host] if script.host else []
    command += ["--device", "npu", "--force-files"] if simulated else []
    paths = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, Path(script.path).name, *script.arguments, *way.arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return script.losses(folder, done.stdout)


def main(names: Sequence[str]) -> None:
    """Print the table."""
    print("| script | way | losses |\n|---|---|---|")
    for chosen in names or SCRIPTS:
        name, _, kinds = chosen.partition(":")
        script = SCRIPTS[name]
        reason = why_not(script)
        for kind, way in {} if reason else script.ways.items():
            if kinds and kind not in kinds.split(","):
                continue
            with tempfile.TemporaryDirectory() as folder:
                losses = losses_of(script, way, Path(folder))
            print(f"| {name} | {kind} | {' '.join(f'{loss:.3f}' for loss in losses)} |", flush=True)
        if reason:
            print(f"| {name} | {reason} | |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
