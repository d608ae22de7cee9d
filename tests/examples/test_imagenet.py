# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""examples/imagenet: it learns, computes what plain torch does, and resumes bit for bit."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covering import on_one_device
from devices import DEVICE, require
from example_runs import differences, level, stopped_after
from torch.nn import functional as F
from torch.optim import lr_scheduler

pytestmark = pytest.mark.device

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
np = pytest.importorskip("numpy")

NETWORKS = Path(__file__).parent / "networks"
TINY = ["-a", "tiny", "-j", "0", "-b", "8", "--image-size", "16", "-p", "100", "--lr", "0.2", "--warmup-epochs", "1"]

NOT_TAKEN = ["Nadamax", "lr_scheduler", "FusedEMA", "FusedOptimizer", "Optimizer", "LBFGS", "SparseAdam"]

CHANNELS_LAST = [] if DEVICE.type == "npu" else ["--channels-last"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Images of three classes, each with a colour of its own under noise: 24 to train on, 9 to validate."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(("blue", "green", "red")):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 160, (20, 24, 3))
                pixels[:, :, label] += 90
                Image.fromarray(pixels.astype("uint8")).save(root / part / name / f"{number}.png")
    return root


@pytest.fixture
def main(example, monkeypatch):
    """examples/imagenet/main.py, with a tiny network by the name of timm's."""
    monkeypatch.setitem(sys.modules, "torchvision", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "timm", None)  # afterwards it is what it was
    del sys.modules["timm"]
    monkeypatch.syspath_prepend(str(NETWORKS))
    return example("imagenet")


@pytest.fixture
def run(main, folder, tmp_path):
    def run_here(*options: str, output: Path = tmp_path) -> dict:
        main.main([*TINY, "--device", DEVICE.type, "--output", str(output), *options, str(folder)])
        return torch.load(output / "checkpoint.pth.tar", weights_only=True)

    return run_here


@pytest.mark.parametrize(
    "options",
    [
        level("O0"),
        level("O1"),
        level("O2", "--combine-grad", "--fuse-unscale", quick=True),
        level("O2", "--optimizer", "SGD", "--loss-scale", "128", "--keep-batchnorm-fp32", "False"),
        level("O3"),
        level("O4", "--optimizer", "NpuFusedLamb", "--lr", "0.05"),
        level("O5", "--combine-grad"),
    ],
)
def test_it_learns(run, losses, capsys, options):
    state = run("--epochs", "6", *options)
    assert len(losses) == 18
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])
    assert state["best_acc1"] >= 0.75
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("validation") for line in lines) == 6
    assert any(line.startswith("epoch 5 [3/3]") and "images/s" in line for line in lines)


def test_losses_of_o0_are_those_of_plain_torch(main, run, losses, folder, monkeypatch):
    import models
    import train

    initial = []
    create_model = models.create_model

    def create_and_keep(*args):
        initial.append(copy.deepcopy(model := create_model(*args)))
        return model

    monkeypatch.setattr(train, "create_model", create_and_keep)
    options = ["--opt-level", "O0", "--epochs", "2"]
    state = run(*options)

    args = main.make_parser().parse_args([*TINY, *options, str(folder)])
    loader, _, _ = train.make_loaders(args)
    model = initial[0].to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    warmup = lr_scheduler.LinearLR(optimizer, 1 / 3, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    expected = []
    for epoch in range(2):
        torch.manual_seed(10_007 * (epoch + 1))
        loader.sampler.set_epoch(epoch)
        for images, targets in loader:
            loss = F.cross_entropy(model(images.to(DEVICE)), targets.to(DEVICE), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state["state_dict"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        level("O0", "--optimizer", "SGD"),
        level("O1", "--combine-grad"),
        level("O2", "--combine-grad", quick=True),
        level("O2", *CHANNELS_LAST, "-j", "2", "--optimizer", "NpuFusedAdamW", "--lr", "0.01"),
        level("O5"),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(run, main, losses, tmp_path, options):
    import train

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    expected = run("--epochs", "3", *options, output=whole)
    expected_losses = losses.copy()
    losses.clear()

    with stopped_after(train, "save_checkpoint"):
        run("--epochs", "3", *options, output=stopped)
    actual = run("--epochs", "3", *options, "--resume", str(stopped / "checkpoint.pth.tar"), output=stopped)
    assert losses == expected_losses
    assert len(losses) == 9
    assert differences(actual, expected) == []


def test_the_best_model_is_kept(run, main, tmp_path, monkeypatch):
    import train

    accuracies = iter([0.5, 0.75, 0.25])
    monkeypatch.setattr(train, "validate", lambda *args: next(accuracies))
    last = run("--epochs", "3", "--opt-level", "O0")
    best = torch.load(tmp_path / "model_best.pth.tar", weights_only=True)
    assert (best["epoch"], best["best_acc1"]) == (2, 0.75)
    assert (last["epoch"], last["best_acc1"]) == (3, 0.75)


def test_evaluate_prints_what_the_last_epoch_did(run, capsys, tmp_path):
    run("--epochs", "1", "--opt-level", "O2")
    trained = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    run("--evaluate", "--opt-level", "O2", "--resume", str(tmp_path / "checkpoint.pth.tar"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("validation")] == trained[-1:]
    assert f"{tmp_path / 'checkpoint.pth.tar'}: the weights after epoch 1, best top-1" in "\n".join(lines)


def test_random_images_and_pretrained_weights(main, tmp_path, losses):
    options = ["--dummy", "16", "--epochs", "1", "--opt-level", "O0", "--pretrained", "--lr", "0"]
    main.main([*TINY, *options, "--device", DEVICE.type, "--output", str(tmp_path)])
    state = torch.load(tmp_path / "checkpoint.pth.tar", weights_only=True)
    assert state["state_dict"]["6.bias"].tolist() == [0.25] * 1000
    assert len(losses) == 2


def test_a_progress_bar_on_a_terminal(run, capsys, monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run("--epochs", "1", "--opt-level", "O0")
    out, err = capsys.readouterr()
    assert not any(line.startswith("epoch") for line in out.splitlines())
    assert "epoch 0: 100%" in err
    assert "images/s" in err


def test_export(run, main, tmp_path):
    require("onnx_export")
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    import models

    path = tmp_path / "model.onnx"
    state = run("--epochs", "1", "--opt-level", "O2", "--export", str(path))
    images = torch.randn(5, 3, 16, 16)
    session = runtime.InferenceSession(path)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    model = models.create_model("tiny", 3, False).eval()
    model.load_state_dict(state["state_dict"])
    torch.testing.assert_close(torch.from_numpy(outputs), model(images), rtol=1e-4, atol=1e-5)


def test_export_without_its_packages_is_refused_before_the_training(run, main, losses, monkeypatch, tmp_path):
    import train

    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--export: onnx .*missing"):
        run("--export", str(tmp_path / "model.onnx"))
    assert losses == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-a", "resnet8"], "--arch resnet8: neither torchvision nor timm has it; models.py has resnet18"),
        (["-a", "resnet50", "--pretrained"], "--pretrained: weights of resnet50 for 3 classes need timm"),
        (["-b", "25"], "--batch-size 25: there are only 24 images"),
        (["-b", "0"], "--batch-size 0"),
        (["-j", "-1"], "--workers -1: a number from 0 on is expected"),
        (["--dummy", "0"], "--dummy 0: a number from 1 on is expected"),
        (["--dummy", "-5"], "--dummy -5: a number from 1 on is expected"),
        (["--start-epoch", "-1"], "--start-epoch -1: a number from 0 on is expected"),
        (["--lr", "nan"], "--lr nan: a number from 0 on is expected"),
        (["--label-smoothing", "2"], "--label-smoothing 2.0: a share from 0 to 1 is expected"),
        (["--loss-scale", "abc"], "--loss-scale/--loss_scale: 'dynamic' or a positive number is expected, not 'abc'"),
        (["--loss-scale", "-1"], "--loss-scale/--loss_scale: 'dynamic' or a positive number is expected, not '-1'"),
        (["--export", "."], "--export .: a folder; name a file in it"),
        *((["--optimizer", name], f"--optimizer {name}: no optimizer with lr and weight_decay") for name in NOT_TAKEN),
        (["--optimizer", "Muon"], "--optimizer Muon: "),
        (["--combine-ddp"], "add --combine-grad"),
        (["--resume", "no-such-file"], "--resume no-such-file: there is no such file"),
        (["--output", "no/such/folder"], "--output: no/such/folder is no folder"),
        (["--device", "cuda" if DEVICE.type != "cuda" else "npu"], "sees no such device; use cpu or auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_named(refuses, options, words):
    refuses(words, *options)


def test_the_optimizers_that_the_refusal_lists_are_taken(main):
    import train

    args = main.make_parser().parse_args(["--optimizer", "FusedEMA"])
    with pytest.raises(SystemExit) as refusal:
        train.make_optimizer(torch.nn.Linear(2, 2), args)
    names = str(refusal.value).split(" one of ")[1].split(", ")
    assert {"NpuFusedSGD", "NpuFusedAdamW", "FusedLAMB", "Lamb"} <= set(names)
    for args.optimizer in names:
        assert type(train.make_optimizer(torch.nn.Linear(2, 2), args)).__name__ == args.optimizer


@pytest.mark.skipif(DEVICE.type != "npu", reason="of torch_npu alone")
def test_channels_last_is_refused_on_an_npu(run):
    with pytest.raises(SystemExit, match="--channels-last: "):
        run("--channels-last")


def test_folders_without_images_are_named(main, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main.main([str(tmp_path)])
    assert "--dummy trains on random images" in capsys.readouterr().err
    for part in ("train", "val"):
        (tmp_path / part / "cats").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"no images; expected are .*CLASS/IMAGE"):
        main.main(["--device", "cpu", str(tmp_path)])


def test_a_checkpoint_of_another_network_is_refused(run, tmp_path):
    run("--epochs", "1", "--opt-level", "O0")
    state = torch.load(tmp_path / "checkpoint.pth.tar", weights_only=True)
    torch.save({**state, "arch": "resnet50"}, tmp_path / "other")
    with pytest.raises(SystemExit, match=r"--arch resnet50.* tiny"):
        run("--resume", str(tmp_path / "other"))
    torch.save(state["state_dict"], tmp_path / "other")
    with pytest.raises(SystemExit, match="not a checkpoint of this example"):
        run("--resume", str(tmp_path / "other"))
    (tmp_path / "other").write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match="not a whole checkpoint"):
        run("--resume", str(tmp_path / "other"))


def test_a_resumed_run_with_another_optimizer_or_options_of_it_is_refused(run, losses, tmp_path):
    common = ["--epochs", "1", "--opt-level", "O0", "--optimizer", "SGD", "--momentum", "0.5"]
    run(*common)
    losses.clear()
    resume = [*common, "--resume", str(tmp_path / "checkpoint.pth.tar")]
    for option, saved, new in (
        ("--optimizer", "SGD", "NpuFusedAdam"),
        ("--momentum", 0.5, 0.9),
        ("--weight-decay", 0.0001, 0.2),
    ):
        with pytest.raises(SystemExit, match=f"{saved}.* {new}; add {option} {saved}"):
            run(*resume, option, str(new))
    run(*resume)
    run("--evaluate", *resume[-2:])  # which has no use for them
    assert losses == []


def test_a_checkpoint_of_other_classes_is_refused(main, run, tmp_path):
    run("--epochs", "1", "--opt-level", "O0")
    resume = ["--resume", str(tmp_path / "checkpoint.pth.tar"), "--output", str(tmp_path), "--device", DEVICE.type]
    with pytest.raises(SystemExit, match=r"1000 classes: .*\[3\b"):
        main.main([*TINY, "--dummy", "8", "--evaluate", *resume])


def test_means_are_those_of_all_processes(main, monkeypatch):
    import train

    # The sums of this process: loss, right at first, among the first five, images.
    outputs = torch.arange(8.0, 0, -1).expand(4, 8)
    sums = train.measure(torch.tensor(0.5), outputs, torch.tensor([0, 0, 3, 7]))
    assert sums.tolist() == [2, 2, 3, 4]
    assert train.means(sums) == [0.5, 0.5, 0.75]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(torch.tensor([6.0, 0, 6, 12])))
    assert train.means(sums) == [0.5, 0.125, 0.5625]
    assert sums.tolist() == [2, 2, 3, 4]


def test_schedules(main):
    import train

    args = Namespace(lr=1.0, warmup_epochs=2, epochs=100, schedule="step")
    rates = [train.learning_rate(step, 4, args) for step in range(400)]
    assert rates[:9] == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    assert [round(rates[epoch * 4], 6) for epoch in (29, 30, 59, 60, 90)] == [1.0, 0.1, 0.1, 0.01, 0.001]
    args.schedule, args.epochs = "cosine", 6
    rates = [train.learning_rate(step, 4, args) for step in range(24)]
    assert rates[16] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.01


def test_augmented_images_come_from_the_image(main):
    import data

    # Red grows to the right, green downwards: an image's part shows where it is from.
    ramp = np.zeros((50, 80, 3), dtype="uint8")
    ramp[:, :, 0] = np.arange(80) * 3
    ramp[:, :, 1] = np.arange(50)[:, None] * 5
    image = Image.fromarray(ramp)
    torch.manual_seed(0)
    mirrored = 0
    for _ in range(50):
        red, green, blue = data.augment(image, size=16) * data.STD + data.MEAN
        assert blue.abs().max() < 1e-6
        assert (green.diff(dim=0) >= -1e-6).all()
        steps = red.diff(dim=1)
        mirrored += bool(steps.sum() < 0)
        width = (red.max() - red.min()) * 255 / 3
        height = (green.max() - green.min()) * 255 / 5
        assert 0.05 <= width * height / (50 * 80) <= 1
    assert 10 < mirrored < 40
    middle = data.evaluate(image, size=7) * data.STD + data.MEAN
    assert middle[0, 3, 3].item() == pytest.approx(39.5 * 3 / 255, abs=0.01)
    assert middle[1, 3, 3].item() == pytest.approx(24.5 * 5 / 255, abs=0.01)


@pytest.mark.framework
def test_its_resnets_are_torchvisions(main, monkeypatch):
    import models

    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in models.ResNet(*shape, 1000).parameters())
            for name, shape in models.RESNETS.items()
        }
    # Of the paper's networks, as torchvision and timm document them.
    assert counts == {
        "resnet18": 11_689_512,
        "resnet34": 21_797_672,
        "resnet50": 25_557_032,
        "resnet101": 44_549_160,
        "resnet152": 60_192_808,
    }
    monkeypatch.delitem(sys.modules, "torchvision")
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)
    for name in ("resnet18", "resnet50"):
        theirs, ours = torchvision.models.get_model(name), models.ResNet(*models.RESNETS[name], 1000)
        ours.load_state_dict(theirs.state_dict())
        images = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.slow
@pytest.mark.parametrize("opt_level", on_one_device(["O1", "O2", "O5"]))  # without masters, with them, and bfloat16
def test_two_processes_resume_bit_for_bit_with_either_kind_of_averaging(start_example, folder, tmp_path, opt_level):
    # The learning rate does not depend on the number of epochs here.
    options = [*TINY, "--schedule", "step", "--device", DEVICE.type, "--combine-grad", "--opt-level", opt_level]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for output, *others in (
        (whole, "--epochs=2"),  # averaged by DistributedDataParallel
        (stopped, "--epochs=1", "--combine-ddp"),
        (stopped, "--epochs=2", "--combine-ddp", f"--resume={stopped / 'checkpoint.pth.tar'}"),
    ):
        output.mkdir(exist_ok=True)
        arguments = [*options, *others, "--output", str(output), str(folder)]
        done = start_example("imagenet/main.py", *arguments, processes=2)
        assert done.returncode == 0, done.stdout + done.stderr
        # The first process alone prints.
        validations = [line for line in done.stdout.splitlines() if line.startswith("validation")]
        assert len(validations) == (2 if output == whole else 1)
    expected, actual = (torch.load(path / "checkpoint.pth.tar", weights_only=True) for path in (whole, stopped))
    assert differences(actual, expected) == []


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.slow
def test_two_processes_with_synchronized_batch_norms_compute_what_one_does(start_example, run, capsys, tmp_path):
    # Of random images, which are not augmented.
    options = ["-a", "tiny_without_dropout", "--dummy", "24", "--epochs", "2", "--opt-level", "O0", "--sync-bn"]
    options += ["--combine-grad", "--combine-ddp"]
    states = [run(*options)["state_dict"]]
    printed = [capsys.readouterr().out]
    two = tmp_path / "two"
    two.mkdir()
    arguments = [*TINY, *options, "--device", DEVICE.type, "--output", str(two)]
    done = start_example("imagenet/main.py", *arguments, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    states.append(torch.load(two / "checkpoint.pth.tar", weights_only=True)["state_dict"])
    printed.append(done.stdout)
    lines = [[line.split()[3:9] for line in text.splitlines() if line.startswith("epoch ")] for text in printed]
    assert len(lines[0]) == 2
    for one, two in zip(*lines, strict=True):  # loss, top-1 and top-5 of the images of both processes
        assert float(two[1]) == pytest.approx(float(one[1]), abs=2e-4)
        assert two[2:] == one[2:]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_synchronized_batch_norms_of_distributed_data_parallel_are_refused_on_the_cpu(main, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(SystemExit, match=r"--sync-bn: .*cards"):
        main.main([*TINY, "--dummy", "24", "--device", "cpu", "--sync-bn"])
