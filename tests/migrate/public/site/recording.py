# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``sitecustomize`` starts: the device, draws on the CPU, and the losses of each backward."""

import contextlib
import importlib
import os
import random
import re
from pathlib import Path
from typing import Any

_CUDA = re.compile(r"cuda(:\d+)?")


def start() -> None:
    import torch

    device = os.environ["SCRIPT_DEVICE"]
    # Made before others put their functions in the place of torch's.
    mode = _mode(torch, on_cpu=device == "cpu")
    if device != "cpu":
        importlib.import_module(device).install()
    if os.environ.get("SCRIPT_TRANSFER"):
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
    torch.manual_seed(0)
    random.seed(0)
    sample = random.sample
    # Python 3.11 takes no sets here.
    random.sample = lambda of, k: sample(sorted(of) if isinstance(of, set) else of, k)
    mode.__enter__()
    if device == "cpu":
        _cuda_is_the_cpu(torch)


def _mode(torch: Any, on_cpu: bool) -> Any:
    """Numbers are drawn on the CPU, and moved; ``on_cpu``: devices of CUDA are the CPU."""
    factories = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
    alike = {torch.randn_like: torch.randn, torch.rand_like: torch.rand}
    in_place = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_, torch.Tensor.random_}
    stays = {torch.Tensor.cuda, torch.Tensor.pin_memory}

    def is_cuda(value: Any) -> bool:
        text = isinstance(value, str) and _CUDA.fullmatch(value) is not None
        return text or (isinstance(value, torch.device) and value.type == "cuda")

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return x * ((torch.rand(x.shape) >= p).to(x.dtype) / (1 - p)).to(x.device) if training else x

    losses: list[float] = []

    def record(loss: Any) -> None:
        group = torch.distributed
        rank = group.get_rank() if group.is_available() and group.is_initialized() else 0
        if len(losses) == int(os.environ["SCRIPT_STEPS"]):
            if group.is_available() and group.is_initialized():
                # Without the interpreter's end: scripts leave their group to it, and gloo's threads may end it by
                # SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
                group.barrier()
                os._exit(0)
            raise SystemExit(0)
        losses.append(float(loss.detach()))
        with Path(os.environ["SCRIPT_LOSSES"], f"{rank}.txt").open("a") as file:
            file.write(f"{losses[-1]!r}\n")

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if on_cpu:
                if function in stays:
                    return args[0]
                args = tuple("cpu" if is_cuda(one) else one for one in args)
                kwargs = {name: "cpu" if is_cuda(one) else one for name, one in kwargs.items()}
            if function is torch.Tensor.backward and args[0].numel() == 1:
                record(args[0])
            if function in factories and kwargs.get("device") is not None:
                return function(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
            if function in alike:
                return alike[function](args[0].shape, dtype=args[0].dtype).to(args[0].device)
            if function is torch.nn.functional.dropout:
                return dropout(*args, **kwargs)
            fills = function in in_place or getattr(function, "__module__", "") == "torch.nn.init"
            tensor = args[0] if args else kwargs.get("tensor")
            if fills and tensor is not None and tensor.device.type != "cpu":
                with torch.no_grad():
                    drawn = function(torch.empty(tensor.shape, dtype=tensor.dtype), *args[1:], **_without(kwargs))
                    return tensor.copy_(drawn)
            return function(*args, **kwargs)

    return Mode()


def _without(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "tensor"}


class _Stream:
    def wait_stream(self, other: "_Stream") -> None:
        pass


def _cuda_is_the_cpu(torch: Any) -> None:
    answers = {
        **{"is_available": True, "is_bf16_supported": True, "device_count": 2, "current_device": 0},
        **dict.fromkeys(("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    group, parallel = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel
    start = parallel.__init__

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return group("gloo", *args, **kwargs)

    def wrap(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        start(self, module, None, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    parallel.__init__ = wrap
