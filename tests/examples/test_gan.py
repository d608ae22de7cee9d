# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""examples/gan: what it generates comes to resemble its data; it computes what plain torch does, and resumes."""

from __future__ import annotations

import sys

import pytest
import torch
from devices import DEVICE
from example_runs import differences, level
from torch.nn import functional as F

pytestmark = pytest.mark.device

SMALL = ["--width", "8", "--lr", "2e-3", "--batch-size", "32"]


@pytest.fixture
def main(example, monkeypatch):
    """examples/gan/main.py, with fewer images."""
    module = example("gan")
    import train

    load_images = train.load_images
    monkeypatch.setattr(train, "load_images", lambda data: load_images(data)[:128])
    return module


@pytest.fixture
def run(main, tmp_path):
    def run_here(*options: str, save=tmp_path / "gan.pt") -> dict:
        main.main([*SMALL, "--device", DEVICE.type, "--save", str(save), *options])
        return torch.load(save, weights_only=True)

    return run_here


LEVELS = [level("O0"), level("O1"), level("O2", "--combine-grad"), level("O5")]


def error_of_mean(state: dict) -> float:
    """The distance of the mean generated image from the mean image of the data, per pixel."""
    import train

    generator = train.Generator(8)
    generator.load_state_dict(state["generator"])
    torch.manual_seed(5)
    images = generator(torch.randn(256, train.NOISE, 1, 1))
    return (images.mean(0) - train.load_images("discs").mean(0)).square().mean().sqrt().item()


@pytest.mark.parametrize("options", LEVELS)
def test_generated_images_come_to_resemble_the_data(run, options):
    untrained = error_of_mean(run("--lr", "0", "--epochs", "1", *options))
    trained = error_of_mean(run("--epochs", "9", *options))
    assert trained < 0.75 * untrained


def test_each_loss_has_a_scale_of_its_own(run, losses):
    state = run("--epochs", "1", "--opt-level", "O1")
    assert sorted(state["amp"]) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]
    assert len(losses) == 3 * 4


def test_losses_of_o0_are_those_of_plain_torch(run, losses):
    import train

    state = run("--epochs", "2", "--opt-level", "O0", "--combine-grad", "--lr", "2e-4")
    torch.manual_seed(0)
    generator, discriminator = train.Generator(8).to(DEVICE), train.Discriminator(8).to(DEVICE)
    options = {"lr": 2e-4, "betas": (0.5, 0.999)}
    optimizer_g = torch.optim.Adam(generator.parameters(), **options)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), **options)
    images = train.load_images("discs").to(DEVICE)
    ones, zeros = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    expected = []
    for epoch in range(2):
        torch.manual_seed(10_007 * (epoch + 1))
        for batch in torch.randperm(128).split(32):
            fake = generator(torch.randn(32, train.NOISE, 1, 1, device=DEVICE))
            loss_real = F.binary_cross_entropy_with_logits(discriminator(images[batch.to(DEVICE)]), ones)
            loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
            optimizer_d.zero_grad()
            loss_real.backward()
            loss_fake.backward()
            optimizer_d.step()
            loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            expected += [loss_real.item(), loss_fake.item(), loss_g.item()]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert state["epoch"] == 2


@pytest.mark.parametrize("options", [level("O0"), level("O1"), level("O2", "--combine-grad", quick=True), level("O5")])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(run, losses, tmp_path, options):
    expected = run("--epochs", "2", *options)
    expected_losses = losses.copy()
    losses.clear()
    stopped = tmp_path / "stopped.pt"
    run("--epochs", "1", *options, save=stopped)
    torch.manual_seed(1234)  # a new process has another state of random numbers
    actual = run("--epochs", "2", *options, "--resume", str(stopped), save=stopped)
    assert losses == expected_losses
    for part in ("amp", "generator", "discriminator"):
        assert differences(actual[part], expected[part]) == []
    for optimizer in ("optimizer_g", "optimizer_d"):
        assert differences(actual[optimizer]["state"], expected[optimizer]["state"]) == []


def test_other_files_and_models_are_not_resumed(run, tmp_path):
    path = tmp_path / "gan.pt"
    run("--epochs", "1", "--opt-level", "O0")
    for option, saved, new in (("--width", 8, 4), ("--lr", 0.002, 0.001)):  # the optimizers' states have the lr
        words = f"it was saved with {option} {saved}, this run has {new}; add {option} {saved}"
        with pytest.raises(SystemExit, match=words):
            run(option, str(new), "--resume", str(path))
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(SystemExit, match="not a checkpoint of this example"):
        run("--resume", str(path))
    path.write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match="not a whole checkpoint"):
        run("--resume", str(path))


def test_digits_and_a_picture(run, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    pytest.importorskip("PIL", reason="pillow is not installed")
    path = tmp_path / "samples.png"
    run("--epochs", "1", "--opt-level", "O0", "--data", "digits", "--image", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_finished_checkpoint_shows_the_image_of_its_run(run, tmp_path):
    pytest.importorskip("PIL", reason="pillow is not installed")
    paths = [tmp_path / name for name in ("run.png", "resumed.png", "other.png")]
    common = ["--epochs", "1", "--opt-level", "O0"]
    run(*common, "--image", str(paths[0]))
    resumed = [*common, "--resume", str(tmp_path / "gan.pt")]
    torch.manual_seed(1234)  # a new process has another state of random numbers
    run(*resumed, "--image", str(paths[1]))
    run(*resumed, "--image", str(paths[2]), "--seed", "1")
    images = [path.read_bytes() for path in paths]
    assert images[1] == images[0]
    assert images[2] != images[0]


@pytest.mark.parametrize("name", ["x.jpgg", "x", "x.psd", "x.xbm", "x.qoi"])
def test_an_image_that_pillow_cannot_write_is_refused_before_the_training(refuses, tmp_path, name):
    pytest.importorskip("PIL", reason="pillow is not installed")
    path = tmp_path / name
    refuses(f"--image {path}: pillow writes no gray image with the ending {path.suffix!r}", "--image", str(path))


def test_an_image_without_pillow_is_refused_before_the_training(refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    refuses("--image needs pillow: pip install pillow", "--image", "x.png")


@pytest.mark.parametrize("option", ["--image", "--save"])
def test_a_folder_is_no_file(refuses, tmp_path, option):
    refuses(f"{option} {tmp_path}: a folder; name a file in it", option, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "300"], "--batch-size 300: there are only 128 images"),
        (["--lr", "-1"], "--lr -1.0: a number from 0 on is expected"),
        (["--loss-scale", "abc"], "--loss-scale: 'dynamic' or a positive number is expected, not 'abc'"),
        (["--loss-scale", "inf"], "--loss-scale: 'dynamic' or a positive number is expected, not 'inf'"),
        (["--epochs", "0"], "--epochs 0: a number from 1 on is expected"),
        (["--resume", "no-such-file"], "--resume no-such-file: there is no such file"),
        (["--image", "no/such/folder.png"], "--image no/such/folder.png: no/such is no folder"),
        (["--device", "cuda" if DEVICE.type != "cuda" else "npu"], "sees no such device; use cpu or auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(refuses, options, words):
    refuses(words, *options)
