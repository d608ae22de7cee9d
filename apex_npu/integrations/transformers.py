# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""transformers: amp in a ``Trainer`` or any subclass of it, and fused optimizers by name."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version
from typing import Any, TypeVar

import torch

from apex_npu.backends.requirements import require
from apex_npu.integrations.optimizer_names import HostMuon, optimizer_class, optimizer_classes

require(__name__, "transformers", "4.57")

from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.training_args import OptimizerNames  # noqa: E402

from apex_npu.integrations.accelerate import ApexAccelerator  # noqa: E402

# transformers 4 has other arguments for FSDP2, which are not tested.
BEFORE_5 = int(version("transformers").split(".")[0]) < 5

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def use_amp(trainer: AnyTrainer, opt_level: str = "O1", **amp_options: Any) -> AnyTrainer:
    """Train ``trainer`` at ``opt_level``.

    Its accelerator becomes an ``ApexAccelerator``. Gradients are clipped unscaled.
    The schedule does not advance after skipped steps. Checkpoints have float32 weights and the loss scale. At O2, O3
    and O5 the ``config.json`` beside them has the dtype that the model computes in: load them with
    ``dtype=torch.float32``. With FSDP2 in its arguments the model is sharded by ``amp.fsdp_policy(opt_level)``.

    Args:
        trainer: A ``Trainer``, or a subclass's of trl or others, whose ``train`` has not been called.
        opt_level: "O0" to "O5".
        **amp_options: Other arguments of ``amp.initialize``.

    Returns:
        ``trainer``.

    Raises:
        ValueError: ``trainer.args`` has bf16, fp16, FSDP1 or DeepSpeed; ``fuse_unscale`` is given, since a Trainer
            clips with torch's functions; or the model is in half precision.
    """
    args = trainer.args
    for name in ("bf16", "fp16"):
        if getattr(args, name):
            raise ValueError(
                f"TrainingArguments({name}=True) and opt_level={opt_level!r} are two kinds of mixed precision at once: "
                f"leave {name} out, or do not call use_amp"
            )
    if getattr(trainer, "is_fsdp_enabled", False) and (BEFORE_5 or not trainer.accelerator.is_fsdp2):
        raise ValueError(
            f"opt_level={opt_level!r} works only with FSDP2 of transformers 5: pass TrainingArguments(fsdp=True, "
            "fsdp_config={'version': 2, ...}) there, or write the loop with ApexAccelerator and "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if amp_options.get("fuse_unscale"):
        raise ValueError(
            "fuse_unscale=True keeps gradients multiplied with the loss scale until step(), but a Trainer clips "
            "them with torch's functions before that: leave fuse_unscale out"
        )
    low = [p.dtype for p in trainer.model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
    if low:
        raise ValueError(
            f"the model has parameters in {low[0]}, but opt_level={opt_level!r} needs float32: load it with "
            "from_pretrained(..., dtype=torch.float32), because the default is the dtype of the checkpoint"
        )

    create = trainer.create_accelerator_and_postprocess

    def create_and_adopt() -> None:  # auto_find_batch_size creates another accelerator
        create()
        ApexAccelerator.adopt(trainer.accelerator, opt_level, **amp_options)

    ApexAccelerator.adopt(trainer.accelerator, opt_level, **amp_options)
    trainer.create_accelerator_and_postprocess = create_and_adopt
    return trainer


def optimizer_cls_and_kwargs(
    args: TrainingArguments, name: str = "NpuFusedAdamW", **kwargs: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the argument of ``Trainer(optimizer_cls_and_kwargs=...)`` for an optimizer of ``apex_npu.optimizers``.

    Args:
        args: The source of ``learning_rate``, of ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` if the optimizer
            has betas, and of further arguments in ``optim_args``, as in ``"momentum=0.9,nesterov=True"``.
        name: The name of the optimizer's class.
        **kwargs: Arguments of the optimizer that override all of these.

    Returns:
        The class and its arguments except for the parameters, to which the Trainer adds ``weight_decay``.

    Raises:
        ValueError: There is no such optimizer, or ``optim_args`` are not pairs of a name and a value.
    """
    cls = HostMuon if name == "NpuFusedMuon" else optimizer_class(name)
    found: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in inspect.signature(cls).parameters:
        found.update(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    return cls, {**found, **_parsed(args.optim_args), **kwargs}


def _parsed(optim_args: str | None) -> dict[str, Any]:
    parsed = {}
    for pair in filter(None, (optim_args or "").replace(" ", "").split(",")):
        key, separator, value = pair.partition("=")
        try:
            parsed[key] = ast.literal_eval(value.capitalize() if value.lower() in ("true", "false") else value)
        except (ValueError, SyntaxError):
            parsed[key] = value
        if not (key and separator and value):
            raise ValueError(f"optim_args must be pairs as in 'momentum=0.9,nesterov=True', got {optim_args!r}")
    return parsed


def register() -> None:
    """Make ``--optim`` accept the fused optimizers by the names of their classes in lower case. Idempotent.

    Then ``--optim adamw_torch_npu_fused`` is ``NpuFusedAdamW`` of this package, on every device. A pickled
    ``TrainingArguments`` (``training_args.bin``) with another of these names can only be loaded after this call.
    """
    original = Trainer.get_optimizer_cls_and_kwargs
    if getattr(original, "__module__", None) == __name__:
        return
    names = {name.lower(): name for name in optimizer_classes()}
    for value in names:
        _add_name(value)
    names[OptimizerNames.ADAMW_TORCH_NPU_FUSED.value] = "NpuFusedAdamW"

    def get_optimizer_cls_and_kwargs(args: TrainingArguments, *rest: Any, **named: Any) -> tuple[Any, Any]:
        """Return the class and the arguments of a fused optimizer, or those that transformers itself returns."""
        name = names.get(OptimizerNames(args.optim).value)
        if name is not None:
            return optimizer_cls_and_kwargs(args, name)
        found: tuple[Any, Any] = original(args, *rest, **named)
        return found

    Trainer.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)


def _add_name(value: str) -> None:
    """Add ``value`` to ``OptimizerNames``; TrainingArguments and its command line accept no other names."""
    member = str.__new__(OptimizerNames, value)
    member._name_, member._value_ = value.upper(), value
    OptimizerNames._member_names_.append(member._name_)
    OptimizerNames._member_map_[member._name_] = member
    OptimizerNames._value2member_map_[value] = member
