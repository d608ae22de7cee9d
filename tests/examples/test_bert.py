# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""examples/bert: it learns, computes what plain torch does, resumes bit for bit, and transformers reads what it writes.

`make test-hosts HOSTS=transformers` runs it; in the environment of `make test` transformers is missing.
"""

from __future__ import annotations

import copy
import importlib
import random

import pytest
import torch
from devices import DEVICE
from example_runs import differences, level, stopped_after
from torch.nn import functional as F

pytestmark = pytest.mark.framework

WORDS = ["ant", "bee", "cat", "dog", "elk", "fox"]
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--sequence-length", "10", "-b", "16", "--accumulate", "2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """text.txt, in which a word comes eight times in a row, as many as a sequence has, and one of them most often."""
    root = tmp_path_factory.mktemp("text")
    words = [word for word in random.Random(0).choices(WORDS, [15, 1, 1, 1, 1, 1], k=60) for _ in range(8)]
    (root / "text.txt").write_text(" ".join(words), encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (root / "vocab.txt").write_text("\n".join([*special, *WORDS]), encoding="utf-8")
    return root


@pytest.fixture
def main(example):
    return example("bert")


@pytest.fixture
def run(main, folder, tmp_path, monkeypatch):
    if DEVICE.type == "npu" and not hasattr(torch_npu := importlib.import_module("torch_npu"), "npu_fusion_attention"):
        # transformers imports it by name, and calls it for flash attention alone.
        monkeypatch.setattr(torch_npu, "npu_fusion_attention", None, raising=False)
    pytest.importorskip("transformers", reason="transformers is not installed: make setup-hosts HOSTS=transformers")

    def run_here(*options: str, checkpoint=tmp_path / "bert.pt", vocab=("--vocab", str(folder / "vocab.txt"))) -> dict:
        paths = ["--checkpoint", str(checkpoint), *vocab, str(folder / "text.txt")]
        main.main([*TINY, "--device", DEVICE.type, *options, *paths])
        return torch.load(checkpoint, weights_only=True)

    return run_here


LAMB, BERTADAM = ["--optimizer", "lamb", "--lr", "0.1"], ["--optimizer", "bertadam", "--lr", "0.02"]
LEVELS = [
    level("O0", *LAMB),
    level("O1", *BERTADAM),
    level("O2", "--combine-grad", *LAMB),
    level("O2", "--combine-grad", *BERTADAM, quick=True),
    level("O4", "--optimizer", "adamw", "--lr", "0.02"),
    level("O5", *LAMB),
]


@pytest.mark.parametrize("options", LEVELS)
def test_it_learns(run, losses, capsys, options):
    run("--steps", "60", "--dropout", "0", *options)
    assert len(losses) == 120
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["10", "20", "30", "40", "50", "60"]


@pytest.mark.parametrize("options", LEVELS)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(run, main, losses, tmp_path, options):
    import train

    options = ["--steps", "8", "--save-freq", "5", *options]
    expected = run(*options)
    expected_losses = losses.copy()
    losses.clear()

    with stopped_after(train, "save"):
        run(*options, checkpoint=tmp_path / "stopped.pt")
    actual = run(*options, "--resume", checkpoint=tmp_path / "stopped.pt")
    assert losses == expected_losses
    for part in ("amp", "scheduler", "words", "step", "model"):
        assert differences(actual[part], expected[part]) == []
    assert differences(actual["optimizer"]["state"], expected["optimizer"]["state"]) == []


def test_losses_of_o0_are_those_of_plain_torch(run, main, losses, folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    import train

    initial = []

    def create_and_keep(config):
        initial.append(copy.deepcopy(model := transformers.BertForMaskedLM(config)))
        return model

    monkeypatch.setattr(train, "BertForMaskedLM", create_and_keep)
    options = ["--steps", "10", "--opt-level", "O0", "--optimizer", "adamw", "--lr", "0.01", "--dropout", "0"]
    run(*options, "--accumulate", "1")

    args = main.make_parser().parse_args([*TINY, "--vocab", str(folder / "vocab.txt"), str(folder / "text.txt")])
    tokenizer = train.make_tokenizer(args, None)
    sequences = train.read_sequences(args, tokenizer)
    model = initial[0].to(DEVICE).train()
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=10)
    expected = []
    for step in range(10):
        torch.manual_seed(1 + step)
        tokens = sequences[torch.randint(len(sequences), (16,))]
        inputs, targets = train.mask(tokens, tokenizer)
        loss = F.cross_entropy(model(input_ids=inputs.to(DEVICE)).logits.transpose(1, 2), targets.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0)


def test_masks(run, main, folder):
    import train

    args = main.make_parser().parse_args([*TINY, "--vocab", str(folder / "vocab.txt"), str(folder / "text.txt")])
    tokenizer = train.make_tokenizer(args, None)
    sequences = train.read_sequences(args, tokenizer)
    assert (
        tokenizer.decode(sequences.flatten().tolist()).split()[:5]
        == folder.joinpath("text.txt").read_text().split()[:5]
    )
    assert (sequences[:, 0] == 2).all()
    assert (sequences[:, -1] == 3).all()
    tokens = sequences.repeat(100, 1)
    inputs, targets = train.mask(tokens, tokenizer)
    chosen = targets != -100
    assert (targets[chosen] == tokens[chosen]).all()
    assert (inputs[~chosen] == tokens[~chosen]).all()
    assert not chosen[:, [0, -1]].any()
    share = chosen[:, 1:-1].float().mean().item()
    masked = (inputs[chosen] == 4).float().mean().item()
    same = (inputs[chosen] == tokens[chosen]).float().mean().item()
    assert share == pytest.approx(0.15, abs=0.01)
    # A word that is replaced by any other may be replaced by [MASK], or by itself: 11 words are known.
    assert masked == pytest.approx(0.8 + 0.1 / 11, abs=0.03)
    assert same == pytest.approx(0.1 + 0.1 / 11, abs=0.03)


def test_transformers_reads_what_it_writes(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    # The vocabulary is made from the text here.
    state = run("--steps", "2", "--output", str(tmp_path / "bert"), "--vocab-size", "60", vocab=())
    model = transformers.BertForMaskedLM.from_pretrained(tmp_path / "bert")
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state["model"][name].to(value.device)), name
    assert (tmp_path / "bert" / "vocab.txt").read_text().split() == state["words"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sequence-length", "1000"], "fewer than --sequence-length 1000"),
        (["--width", "15"], "--width 15: no multiple of --heads 2"),
        (["--accumulate", "3"], "--accumulate 3: --batch-size 16 is no multiple of it"),
        (["--warmup", "1"], "--warmup 1.0: a share from 0 to less than 1 is expected"),
        (["--resume"], "name one that exists"),
        (["--steps", "0"], "--steps 0: a number from 1 on is expected"),
        (["--sequence-length", "2"], "--sequence-length 2: a number from 3 on is expected"),
        (["--vocab-size", "0"], "--vocab-size 0: a number from 1 on is expected"),
        (["--width", "0"], "--width 0: a number from 1 on is expected"),
        (["--lr", "-1"], "--lr -1.0: a number from 0 on is expected"),
        (["--wd", "nan"], "--weight-decay nan: a number from 0 on is expected"),
        (["--dropout", "2"], "--dropout 2.0: a share from 0 to less than 1 is expected"),
        (["--output", __file__], "a file; name a folder"),
        (["--device", "cuda" if DEVICE.type != "cuda" else "npu"], "sees no such device; use cpu or auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(refuses, options, words):
    refuses(words, *options)


def test_a_folder_is_no_checkpoint(refuses, tmp_path):
    refuses(f"--checkpoint {tmp_path}: a folder; name a file in it", checkpoint=tmp_path)


@pytest.mark.parametrize("optimizer", ["bertadam", "lamb", "adamw"])
def test_a_resumed_run_with_other_options_is_refused(run, losses, optimizer):
    # What the checkpoint's groups of parameters and its schedule would override, or its weights do not fit.
    saved = {"steps": 2, "lr": 0.01, "warmup": 0.5, "weight_decay": 0.1, "width": 16}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in saved.items()]
    same = ["--opt-level", "O0", "--optimizer", optimizer, *options]
    run(*same)
    losses.clear()
    other = "adamw" if optimizer == "lamb" else "lamb"
    for option, value, new in (
        ("--optimizer", optimizer, other),
        ("--steps", 2, 4),
        ("--lr", 0.01, 0.02),
        ("--warmup", 0.5, 0.25),
        ("--weight-decay", 0.1, 0.2),
        ("--width", 16, 32),
        ("--vocab-size", 8000, 60),
    ):
        words = f"saved with {option} {value}, this run has {new}; add {option} {value}, or leave out --resume"
        with pytest.raises(SystemExit, match=words):
            run(*same, f"{option}={new}", "--resume")
    run(*same, "--resume")
    assert losses == []


def test_a_learning_rate_of_zero_is_taken(run):
    states = [run("--steps", steps, "--lr", "0", "--opt-level", "O0", "--wd", "0") for steps in ("1", "3")]
    for name, value in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], value), name


def test_a_resumed_run_has_the_vocabulary_of_its_checkpoint(run, folder, tmp_path):
    words = run("--steps", "1", "--opt-level", "O0")["words"]
    assert run("--steps", "1", "--opt-level", "O0", "--resume", vocab=())["words"] == words
    (tmp_path / "words.txt").write_text("\n".join([*words, "gnu"]), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"words\.txt: .*bert\.pt"):
        run("--steps", "1", "--opt-level", "O0", "--resume", vocab=("--vocab", str(tmp_path / "words.txt")))


@pytest.mark.parametrize(("words", "numbers"), [(["ant", "cat", "Cat"], [5, 6, 7]), (["ant", "cat"], [5, 6, 6])])
def test_a_cased_vocabulary_keeps_the_capitals_of_the_text(run, main, tmp_path, words, numbers):
    import train
    import transformers

    text, vocab, output = (tmp_path / name for name in ("cased.txt", "words.txt", "bert"))
    text.write_text("ant cat Cat " * 20, encoding="utf-8")
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    args = [*TINY, "--steps", "1", "--device", DEVICE.type, "--vocab", str(vocab), "--output", str(output), str(text)]
    main.main(args)
    args = main.make_parser().parse_args(args)
    assert train.read_sequences(args, train.make_tokenizer(args, None))[0, 1:4].tolist() == numbers
    tokenizer = transformers.BertTokenizer.from_pretrained(output)
    assert tokenizer("ant cat Cat", add_special_tokens=False).input_ids == numbers


def test_a_vocabulary_without_masks_is_refused(run, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"lacks \[CLS\], \[MASK\]"):
        run(vocab=("--vocab", str(tmp_path / "words.txt")))


def test_a_vocabulary_with_a_word_twice_is_refused(run, folder, tmp_path):
    (tmp_path / "words.txt").write_text((folder / "vocab.txt").read_text() + "\nbee", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"words.txt: it has bee 2 times"):
        run(vocab=("--vocab", str(tmp_path / "words.txt")))


def test_a_wrong_loss_scale_is_named(main, folder, capsys):
    # Without transformers too.
    with pytest.raises(SystemExit) as refusal:
        main.main(["--loss-scale", "abc", str(folder / "text.txt")])
    assert refusal.value.code == 2
    assert "--loss-scale: 'dynamic' or a positive number is expected, not 'abc'" in capsys.readouterr().err


def test_without_transformers_it_says_so(main, folder, monkeypatch, capsys):
    monkeypatch.setattr(main.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main.main([str(folder / "text.txt")])
    assert "pip install transformers" in capsys.readouterr().err
