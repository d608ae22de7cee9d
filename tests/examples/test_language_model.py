# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""examples/language_model: it learns, computes what plain torch does, resumes bit for bit, and writes."""

from __future__ import annotations

import copy
import functools
import random
import shutil
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from example_runs import differences, level, stopped_after
from torch.nn import functional as F

pytestmark = pytest.mark.device

LR = 0.02
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "8", "-b", "8", "--warmup", "4", "--lr", f"{LR}"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Words in a random order: what follows within a word can be learnt."""
    words = random.Random(0).choices(["apple", "bread", "cider", "dates"], k=400)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


@pytest.fixture
def main(example):
    return example("language_model")


@pytest.fixture
def run(main, text, tmp_path):
    def run_here(*options: str, checkpoint=tmp_path / "model.pt") -> dict:
        main.main([*TINY, "--device", DEVICE.type, "--checkpoint", str(checkpoint), *options, str(text)])
        return torch.load(checkpoint, weights_only=True)

    return run_here


LEVELS = [
    level("O0"),
    level("O1", "--accumulate", "2"),
    level("O2", "--combine-grad", "--accumulate", "2"),
    level("O4", "--combine-grad"),
    level("O5", "--combine-grad", "--accumulate", "2", quick=True),
    level("O4", "--state-dtype", "int8"),
    level("O5", "--store-param-remainders", "--state-dtype", "bfloat16"),
    level("O5", "--optimizer", "muon", "--state-dtype", "bfloat16"),
    level("O5", "--state-device", "cpu", "--accumulate", "2"),
]


@pytest.mark.parametrize("options", LEVELS)
def test_it_learns_and_writes(run, losses, capsys, options):
    run("--steps", "60", "--interval", "30", "--dropout", "0", "--sample", "40", "--prompt", "cid", *options)
    parts = 2 if "--accumulate" in options else 1
    assert len(losses) == 60 * parts
    assert sum(losses[-5 * parts :]) < 0.6 * sum(losses[: 5 * parts])
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["30", "60"]
    assert float(steps[1].split()[5]) < 1.8  # of log(16) = 2.8
    written = lines[-1]
    assert len(written) == 43
    assert written.startswith("cid")
    assert set(written) <= set("apple bread cider dates")


def test_losses_of_o0_are_those_of_plain_torch(main, run, losses, text, monkeypatch):
    import train

    initial = []

    def create_and_keep(*args, **kwargs):
        initial.append(copy.deepcopy(model := create(*args, **kwargs)))
        return model

    create = train.LanguageModel
    monkeypatch.setattr(train, "LanguageModel", create_and_keep)
    options = ["--steps", "12", "--opt-level", "O0", "--combine-grad"]
    run(*options)

    characters = sorted({*text.read_text(), "\n"})
    written = text.read_text()
    tokens = torch.tensor([characters.index(character) for character in written])[: len(written) * 9 // 10]
    model = initial[0].to(DEVICE)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.99))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 4, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.002)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[4])
    expected = []
    for step in range(12):
        torch.manual_seed(1 + step)
        starts = torch.randint(len(tokens) - 8, (8, 1)).flatten().tolist()
        inputs = torch.stack([tokens[start : start + 8] for start in starts]).to(DEVICE)
        targets = torch.stack([tokens[start + 1 : start + 9] for start in starts]).to(DEVICE)
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("options", [level("O0"), *LEVELS[1:]])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(run, main, losses, tmp_path, options):
    import train

    options = ["--steps", "8", "--interval", "5", "--sample", "0", *options]
    expected = run(*options)
    expected_losses = losses.copy()
    losses.clear()

    with stopped_after(train, "save"):
        run(*options, checkpoint=tmp_path / "stopped.pt")
    actual = run(*options, "--resume", checkpoint=tmp_path / "stopped.pt")
    assert losses == expected_losses
    for part in ("amp", "model"):
        assert differences(actual[part], expected[part]) == []
    assert differences(actual["optimizer"]["state"], expected["optimizer"]["state"]) == []


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(run, losses, monkeypatch):
    # Without the compiler of C++, which takes its time.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    options = ["--steps", "4", "--dropout", "0", "--sample", "0", "--opt-level", "O5"]
    run(*options)
    expected = losses.copy()
    losses.clear()
    run(*options, "--compile")
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or DEVICE.type != "cpu", reason="this torch has no gloo")
@pytest.mark.parametrize("level_", ["O2", "O5"])
def test_sharded_over_two_processes_it_goes_on_from_one_and_to_one(run, start_example, text, tmp_path, capsys, level_):
    """In all orders the same training, within the rounding of 16-bit sums."""
    common = ["--interval", "2", "--dropout", "0", "--sample", "0", "--opt-level", level_, "--accumulate", "2"]

    def shard(steps, file, *options):
        arguments = [*TINY, "--device", "cpu", "--checkpoint", str(tmp_path / file), "--steps", str(steps), *options]
        done = start_example("language_model/main.py", *arguments, *common, "--fsdp", str(text), processes=2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("step ") == 1  # by one process
        return torch.load(tmp_path / file, weights_only=True)

    run("--steps", "2", *common, checkpoint=tmp_path / "first")
    shutil.copy(tmp_path / "first", tmp_path / "second")
    whole = run("--steps", "4", *common, "--resume", checkpoint=tmp_path / "first")
    for found in (
        shard(4, "second", "--resume"),
        shard(2, "third") and run("--steps", "4", *common, "--resume", checkpoint=tmp_path / "third"),
    ):
        assert found["model"].keys() == whole["model"].keys()
        # AdamW moves an element by up to about lr in each step. Where a gradient is 0 but for rounding, as that of the
        # biases of keys, its sign depends on the order of 16-bit sums, and with that on the CPU: such elements may part
        # by twice that in two steps. All others stay close.
        apart = torch.cat([(found["model"][name] - value).abs().flatten() for name, value in whole["model"].items()])
        assert apart.max() < 4 * LR
        assert apart.mean() < LR / 20
        assert found["amp"] == whole["amp"]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available() or DEVICE.type != "cpu", reason="this torch has no gloo")
def test_muon_sharded_over_two_processes_goes_on_from_one(run, start_example, text, tmp_path):
    common = ["--interval", "2", "--dropout", "0", "--sample", "0", "--opt-level", "O5", "--optimizer", "muon"]
    run("--steps", "2", *common, checkpoint=tmp_path / "first")
    shutil.copy(tmp_path / "first", tmp_path / "second")
    whole = run("--steps", "4", *common, "--resume", checkpoint=tmp_path / "first")
    arguments = [*TINY, "--device", "cpu", "--checkpoint", str(tmp_path / "second"), "--steps", "4", "--resume"]
    done = start_example("language_model/main.py", *arguments, *common, "--fsdp", str(text), processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(tmp_path / "second", weights_only=True)
    for name, value in whole["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0.0, atol=0.03)


def test_a_trained_model_writes_without_training(run, main, losses, capsys):
    run("--steps", "2", "--sample", "0", "--opt-level", "O4")
    capsys.readouterr()
    losses.clear()
    texts = []
    for _ in range(2):
        run("--sample-only", "--sample", "20", "--opt-level", "O4")
        texts.append(capsys.readouterr().out.splitlines()[-1])
    assert texts[0] == texts[1]
    assert losses == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "1000"], "a tenth of it is to have more than --context 1000 characters"),
        (["--prompt", "Zürich", "--steps", "1"], "--prompt: the text has no 'Z', 'h', 'ü'"),
        (["--prompt", ""], "--prompt: a character at least is expected"),
        (["--width", "15"], "--width 15: no multiple of --heads 2"),
        (["--store-param-remainders"], "--store-param-remainders: with --opt-level O2 or O5 and without --fsdp"),
        (["--state-dtype", "int4"], "--state-dtype: invalid choice: 'int4'"),
        (["--fsdp"], "--fsdp: start it with torchrun, as in torchrun --nproc-per-node 8"),
        (["--accumulate", "3"], "--accumulate 3: --batch-size 8 is no multiple of it"),
        (["--temperature", "0"], "--temperature 0.0: a number above 0 is expected"),
        (["--dropout", "2"], "--dropout 2.0: a share from 0 to less than 1 is expected"),
        (["--lr", "-1"], "--lr -1.0: a number from 0 on is expected"),
        (["--wd", "nan"], "--weight-decay nan: a number from 0 on is expected"),
        (["--width", "0"], "--width 0: a number from 1 on is expected"),
        (["--loss-scale", "abc"], "--loss-scale: 'dynamic' or a positive number is expected, not 'abc'"),
        (["--loss-scale", "0"], "--loss-scale: 'dynamic' or a positive number is expected, not '0'"),
        (["--resume"], "name one that exists"),
        (["--steps", "0"], "--steps 0: a number from 1 on is expected"),
        (["--device", "cuda" if DEVICE.type != "cuda" else "npu"], "sees no such device; use cpu or auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(refuses, options, words):
    refuses(words, *options)


def test_a_checkpoint_of_another_text_is_refused(run, main, text, tmp_path):
    run("--steps", "1", "--sample", "0")
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper(), encoding="utf-8")
    with pytest.raises(SystemExit, match="a text with other characters"):
        main.main([*TINY, "--device", DEVICE.type, "--checkpoint", str(tmp_path / "model.pt"), "--resume", str(other)])


def test_a_checkpoint_of_another_model_is_refused(run):
    run("--steps", "1", "--sample", "0")
    with pytest.raises(SystemExit, match="this run has 2; add --layers 1"):
        run("--layers", "2", "--resume")


def test_a_resumed_run_with_another_weight_decay_is_refused(run, capsys):
    # The checkpoint's groups of parameters would override it; --sample-only has no use for it.
    run("--steps", "1", "--sample", "0", "--wd", "0.2")
    with pytest.raises(SystemExit, match=r"--weight-decay 0\.2.* 0\.1"):
        run("--resume")
    run("--sample-only", "--sample", "3", "--prompt", "bread")
    assert capsys.readouterr().out.splitlines()[-1].startswith("bread")


def test_a_folder_is_no_checkpoint(refuses, tmp_path):
    refuses(f"--checkpoint {tmp_path}: a folder; name a file in it", checkpoint=tmp_path)


def test_characters_per_second_are_those_of_the_training(run, main, capsys, monkeypatch):
    import train

    now, loss_of = 0.0, train.next_token_loss

    def take_time(logits, targets):
        nonlocal now
        now += 0.5 if torch.is_grad_enabled() else 1000.0  # a batch of validation
        return loss_of(logits, targets)

    monkeypatch.setattr(train, "next_token_loss", take_time)
    monkeypatch.setattr(train, "time", Namespace(perf_counter=lambda: now))
    options = ["--interval", "3", "--accumulate", "2", "--sample", "0"]  # two parts of half a second
    run(*options, "--steps", "5")
    run(*options, "--steps", "7", "--resume")
    steps = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line[1] for line in steps] == ["3", "5", "6", "7"]
    assert [line[-2:] for line in steps] == [["64", "characters/s"]] * 4  # 8 sequences of 8 characters a second


def test_validation_does_not_depend_on_how_batches_are_cut(main, text):
    import train

    common = [*TINY, "-b", "32", str(text)]
    args = main.make_parser().parse_args(common)
    torch.manual_seed(0)
    model = train.LanguageModel(17, layers=1, heads=2, width=16, context=8, dropout=0.2)
    content, cpu = train.Text.read(args), torch.device("cpu")
    whole = train.validate(model, content, args, cpu)
    for parts in ("2", "32"):
        args = main.make_parser().parse_args([*common, "--accumulate", parts])
        assert train.validate(model, content, args, cpu) == pytest.approx(whole, rel=1e-5)
