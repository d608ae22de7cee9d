# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""transformers' Trainer with amp and with fused optimizers: losses, checkpoints and schedules as with its own."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from devices import DEVICE, needs
from torch.utils.data import SequentialSampler

if DEVICE.type == "npu" and not hasattr(torch_npu := importlib.import_module("torch_npu"), "npu_fusion_attention"):
    torch_npu.npu_fusion_attention = None  # which transformers imports by name, and calls for flash attention alone
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from apex_npu import amp, optimizers  # noqa: E402
from apex_npu.integrations.accelerate import ApexAccelerator  # noqa: E402
from apex_npu.integrations.transformers import optimizer_cls_and_kwargs, register, use_amp  # noqa: E402

BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5
NOT_ON_CPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="accelerate has no fp16 on a CPU")
WAYS = {"plain": {}, "clipped": {"max_grad_norm": 0.3}, "accumulated": {"gradient_accumulation_steps": 2}}


@pytest.fixture(autouse=True)
def _fresh_state():
    yield
    reset()


def reset():
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # where transformers 4 leaves bf16=True to accelerate
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network():
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def dataset(count=64):
    generator = torch.Generator().manual_seed(3)
    rows = [(torch.arange(8) * 3 + torch.randint(32, (1,), generator=generator)) % 32 for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    """Its batches come in order; the losses of each are kept."""

    overflow_at = ()

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            losses = vars(self).setdefault("losses", [])
            losses.append(float(loss.detach()))
            if len(losses) - 1 in self.overflow_at:
                loss = loss * math.inf
        return loss


def arguments(folder, **options):
    place = {"use_cpu": True} if DEVICE.type == "cpu" else {}
    options = {"max_steps": 8, "learning_rate": 1e-2, "max_grad_norm": 0.0, "save_strategy": "no", **options}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    return TrainingArguments(str(folder), per_device_train_batch_size=4, **quiet, **place, **options)


def trainer_of(folder, *, cls=None, **options):
    args = arguments(folder, **options)
    chosen = {} if cls is None else {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args, cls)}
    return InOrder(network(), args, train_dataset=dataset(), **chosen)


def trained(trainer, **options):
    trainer.train(**options)
    found = trainer.losses, weights(trainer)
    amp.shutdown()
    reset()
    return found


def weights(trainer):
    return torch.cat([v.detach().float().cpu().flatten() for v in trainer.model.state_dict().values()])


def largest(ours, theirs):
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_fused_optimizer_is_torchs(tmp_path, way):
    theirs, expected = trained(trainer_of(tmp_path, optim="adamw_torch", weight_decay=0.1, **WAYS[way]))
    ours, found = trained(trainer_of(tmp_path, cls="NpuFusedAdamW", weight_decay=0.1, **WAYS[way]))
    assert theirs[-1] < theirs[0] - 0.15
    assert largest(ours, theirs) <= 1e-5
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("level", "precision", "tolerance"),
    [
        ("O4", {"bf16": True}, 2e-3),
        ("O5", {"bf16": True}, 3e-2),
        pytest.param("O1", {"fp16": True}, 2e-3, marks=NOT_ON_CPU),
        pytest.param("O2", {"fp16": True}, 4e-3, marks=NOT_ON_CPU),
    ],
)
def test_a_level_is_near_the_trainers_own_mixed_precision(tmp_path, level, precision, tolerance, way):
    plain, _ = trained(trainer_of(tmp_path, **WAYS[way]))
    theirs, _ = trained(trainer_of(tmp_path, **precision, **WAYS[way]))
    options = {"dynamic_init_scale": 2.0**16} if "fp16" in precision else {}
    ours, _ = trained(use_amp(trainer_of(tmp_path, **WAYS[way]), level, verbosity=0, **options))
    assert largest(ours, theirs) <= tolerance
    assert largest(ours, plain) > 1e-5


@pytest.mark.parametrize("cls", [None, "NpuFusedAdamW"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_is_near_float32(tmp_path, level, way, cls):
    plain, _ = trained(trainer_of(tmp_path, **WAYS[way]))
    ours, _ = trained(use_amp(trainer_of(tmp_path, cls=cls, **WAYS[way]), level, verbosity=0))
    assert 1e-6 < largest(ours, plain) <= 5e-3


@pytest.mark.parametrize("cls", [None, "NpuFusedAdamW"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_run_is_resumed_bit_for_bit(tmp_path, level, cls):
    options = {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**8, "scale_window": 3, "verbosity": 0}

    def start():
        return use_amp(trainer_of(tmp_path, cls=cls, save_strategy="steps", save_steps=5), level, **options)

    _, expected = trained(start())
    trainer = start()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert len(trainer.losses) == 3
    assert torch.equal(weights(trainer), expected)
    assert trainer.accelerator.scaler.get_scale() == 2.0**10


@needs("inf")
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_holds_the_schedule_back(tmp_path, level, clip):
    trainer = trainer_of(tmp_path, max_grad_norm=clip)
    trainer.overflow_at = (1, 4)
    use_amp(trainer, level, verbosity=0).train()
    assert trainer.state.global_step == 8
    scheduler = trainer.lr_scheduler
    assert getattr(scheduler, "scheduler", scheduler).last_epoch == 6  # accelerate wraps it, or not
    assert amp.last_step(trainer.optimizer).skipped_steps == 2
    assert trainer.accelerator.scaler.get_scale() == 2.0**14


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_smaller_batch_after_running_out_of_memory(tmp_path, level):
    """auto_find_batch_size makes a new accelerator, and keeps the optimizer."""

    class Greedy(InOrder):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return loss

    args = arguments(tmp_path, auto_find_batch_size=True)
    trainer = use_amp(Greedy(network(), args, train_dataset=dataset()), level, verbosity=0)
    trainer.train()
    assert isinstance(trainer.accelerator, ApexAccelerator)
    assert trainer.state.global_step == 8
    assert trainer.losses[-1] < trainer.losses[0] - 0.3
    assert amp.last_step(trainer.optimizer).applied


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_twice_and_evaluating(tmp_path, level):
    trainer = use_amp(trainer_of(tmp_path), level, verbosity=0)
    trainer.eval_dataset = dataset(8)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    middle = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < middle < before


def test_saved_weights_are_float32(tmp_path):
    trainer = use_amp(trainer_of(tmp_path), "O2", verbosity=0)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    # Without it transformers rounds them to what the trained model computes in, which its config.json has.
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name].cpu()), name


# ----------------------------------------------------------------------------------------------------- optimizers


def test_the_arguments_of_optimizers(tmp_path):
    args = arguments(tmp_path, adam_beta2=0.95, adam_epsilon=1e-6, optim_args="amsgrad=True, weight_decay=0.02")
    expected = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "amsgrad": True, "weight_decay": 0.02}
    assert optimizer_cls_and_kwargs(args) == (optimizers.NpuFusedAdamW, expected)
    assert optimizer_cls_and_kwargs(args, "FusedLAMB", eps=1e-7)[1]["eps"] == 1e-7
    args = arguments(tmp_path, optim_args="momentum=0.9,nesterov=true")
    expected = {"lr": 1e-2, "momentum": 0.9, "nesterov": True}
    assert optimizer_cls_and_kwargs(args, "NpuFusedSGD") == (optimizers.NpuFusedSGD, expected)
    with pytest.raises(ValueError, match=r"no optimizer 'NpuFusedAdan'; it has FusedAdagrad, .*NpuFusedSGD"):
        optimizer_cls_and_kwargs(args, "NpuFusedAdan")
    with pytest.raises(ValueError, match=r"pairs as in 'momentum=0.9,nesterov=True', got 'momentum'"):
        optimizer_cls_and_kwargs(arguments(tmp_path, optim_args="momentum"))


def test_registered_optimizers(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", Trainer.__dict__["get_optimizer_cls_and_kwargs"])
    register()
    register()
    trainer = trainer_of(tmp_path, optim="adamw_torch_npu_fused", optim_args="amsgrad=True")
    assert type(trainer.create_optimizer()) is optimizers.NpuFusedAdamW
    assert all(group["amsgrad"] for group in trainer.optimizer.param_groups)
    assert type(trainer_of(tmp_path, optim="adamw_torch").create_optimizer()) is torch.optim.AdamW
    trainer = trainer_of(tmp_path, optim="npufusedsgd", optim_args="momentum=0.9")
    assert type(trainer.create_optimizer()) is optimizers.NpuFusedSGD


def test_muon_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", Trainer.__dict__["get_optimizer_cls_and_kwargs"])
    register()
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--optim", "npufusedmuon", "--adam_beta2", "0.95", "--weight_decay", "0.1"]
    )
    assert args.to_dict()["optim"] == "npufusedmuon"
    trainer = trainer_of(tmp_path, optim=args.optim, adam_beta2=0.95, weight_decay=0.1)
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, optimizers.NpuFusedMuon)
    for group in optimizer.param_groups:
        assert group["use_muon"] is all(p.dim() == 2 for p in group["params"])
        assert (group["lr"], group["weight_decay"]) == (1e-2, 0.1 if group["use_muon"] else 0.0)
        assert group["use_muon"] or group["betas"] == (0.9, 0.95)
    losses, _ = trained(trainer)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------------ bad input


def test_what_use_amp_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"TrainingArguments\(bf16=True\) and opt_level='O2' are two kinds"):
        use_amp(trainer_of(tmp_path, bf16=True), "O2")
    reset()
    with pytest.raises(ValueError, match=r"fuse_unscale=True keeps.*leave fuse_unscale out"):
        use_amp(trainer_of(tmp_path), "O2", fuse_unscale=True)
    trainer = trainer_of(tmp_path)
    trainer.is_fsdp_enabled = True  # of an accelerator without FSDP2
    with pytest.raises(ValueError, match=r"opt_level='O2' works only with FSDP2 of transformers 5.*'version': 2"):
        use_amp(trainer, "O2")
    trainer = trainer_of(tmp_path)
    trainer.model.bfloat16()
    with pytest.raises(ValueError, match=r"parameters in torch.bfloat16.*opt_level='O5'.*dtype=torch.float32"):
        use_amp(trainer, "O5")
    assert not isinstance(trainer.accelerator, ApexAccelerator)


# ---------------------------------------------------------------------------------------------------------- sharded


@pytest.fixture(scope="module")
def sharded(made_once):
    """Of each way: what both processes have told."""
    return made_once("transformers", lambda: processes.results_of(Path(__file__).with_name("transformers_worker.py")))


@pytest.mark.slow
@pytest.mark.skipif(BEFORE_5, reason="refused")
@pytest.mark.skipif(DEVICE.type == "cpu", reason="accelerate shards on accelerators alone")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_two_processes_train_a_sharded_model(sharded, level):
    """Accumulated and clipped: like DistributedDataParallel in float32 with torch's optimizer."""
    (first, near), (second, _) = sharded[level]
    assert first == second
    assert 0 < near <= (3e-2 if level == "O5" else 5e-3)  # bfloat16 has an eighth of float16's precision


@pytest.mark.slow
@pytest.mark.skipif(BEFORE_5, reason="refused")
@pytest.mark.skipif(DEVICE.type == "cpu", reason="accelerate shards on accelerators alone")
def test_a_sharded_run_is_resumed_bit_for_bit(sharded):
    assert [of_rank[0] for of_rank in sharded["O2"]] == [of_rank[0] for of_rank in sharded["saved"]]
    assert sharded["resumed"] == sharded["saved"]


# ------------------------------------------------------------------------------------- the name apex, before release 5

SCRIPT = """
import sys
import torch
sys.path[:0] = {path!r}
from integrations.test_transformers import InOrder, arguments, dataset, network
args = arguments({folder!r}, fp16=True, half_precision_backend="apex", fp16_opt_level={level!r}, max_grad_norm=0.3,
                 optim={optim!r}, save_strategy="steps", save_steps=5)
trainer = InOrder(network(), args, train_dataset=dataset())
assert trainer.use_apex
trainer.train({resume})
print("losses", trainer.losses)
print("weights", float(sum(p.double().abs().sum() for p in trainer.model.state_dict().values())))
"""


@pytest.mark.skipif(not BEFORE_5, reason="transformers 5 has no apex backend")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="runs its own processes")
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_apex_fused"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_backend_apex(tmp_path, level, optim):
    tests = Path(__file__).parents[1]
    found = []
    for resume in ("", f"resume_from_checkpoint={str(tmp_path / 'checkpoint-5')!r}"):
        script = tmp_path / "train.py"
        values = {"level": level, "folder": str(tmp_path), "optim": optim, "resume": resume}
        script.write_text(SCRIPT.format(path=[str(tests.parent), str(tests)], **values))
        command = [sys.executable, "-m", "apex_npu", "run", str(script)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tests.parent)
        assert result.returncode == 0, result.stderr[-3000:]
        printed = [line.split(" ", 1) for line in result.stdout.splitlines()]
        found.append({name: rest for name, *rest in printed if name in ("losses", "weights")})
    assert found[0]["weights"] == found[1]["weights"]
    losses = [float(number) for number in found[0]["losses"][0].strip("[]").split(",")]
    plain, _ = trained(trainer_of(tmp_path / "plain", max_grad_norm=0.3))
    assert 1e-6 < largest(losses, plain) <= 5e-3
