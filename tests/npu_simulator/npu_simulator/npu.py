# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is to be found as ``torch.npu`` and ``torch_npu.npu``: torch_npu's names, as far as scripts use them.

All work is done when a call returns: streams order nothing, and to synchronise is to count a synchronisation.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npu_simulator import _C  # type: ignore[attr-defined]
from npu_simulator.type_names import type_names

DeviceLike = torch.device | str | int | None
_TOTAL_BYTES = 1 << 36  # reported by a device without a memory limit: 64 GiB


# ---- devices ---------------------------------------------------------------------------------------------------------


def _index(device: DeviceLike = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, (str, torch.device)):
        device = torch.device(device)
        if device.type != "npu":
            raise ValueError(f"Expected an npu device, but got: {device}")
        return current_device() if device.index is None else device.index
    return int(device)


def init() -> None:
    """Nothing to do: the device is there since ``npu_simulator.install()``."""


_lazy_init = init
_initialized = True  # torch.utils.checkpoint keeps the state of random numbers of devices that say so


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False  # host memory survives a fork


def device_count() -> int:
    return int(_C.device_count())


def current_device() -> int:
    return int(_C.current_device())


def set_device(device: DeviceLike) -> None:
    index = _index(device)
    if index >= 0:
        _C.exchange_device(index)


class device:
    """Makes ``device`` the current one inside a ``with`` block; -1 and None change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device() if self.idx < 0 else int(_C.exchange_device(self.idx))

    def __exit__(self, *exc: object) -> None:
        _C.exchange_device(self.prev_idx)


class device_of(device):
    """Makes the device of ``obj``, a tensor, the current one; does nothing for tensors elsewhere."""

    def __init__(self, obj: Tensor) -> None:
        super().__init__(obj.get_device() if obj.device.type == "npu" else -1)


def _exchange_device(device: int) -> int:
    return current_device() if device < 0 else int(_C.exchange_device(device))


_maybe_exchange_device = _exchange_device


def get_device_name(device: DeviceLike = None) -> str:
    _C.memory(_index(device))  # refuses devices that do not exist
    return "Ascend simulated"


# Properties that torch_npu has for the sake of programs for CUDA, without a value.
_OF_CUDA = ("major", "minor", "multi_processor_count", "max_threads_per_multi_processor", "warp_size", "gcnArchName")


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    known = {"name": get_device_name(device), "total_memory": mem_get_info(device)[1], "uuid": "0" * 32}
    cores = {"cube_core_num": 1, "vector_core_num": 2, "L2_cache_size": 1 << 20}
    return SimpleNamespace(**known, **cores, **dict.fromkeys(_OF_CUDA))


def get_device_capability(device: DeviceLike = None) -> None:
    return None  # torch_npu has none either


def can_device_access_peer(device: DeviceLike, peer: DeviceLike) -> bool:
    return _index(device) != _index(peer)


# ---- streams and events ----------------------------------------------------------------------------------------------


def synchronize(device: DeviceLike = None) -> None:
    _C.memory(_index(device))
    _C.synchronize()


class Stream(torch.Stream):
    """A stream of the device, an object on which nothing waits."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=f"npu:{_index(device)}", priority=priority)

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: torch.Stream) -> None:
        pass

    def wait_event(self, event: torch.Event) -> None:
        pass

    def __repr__(self) -> str:
        return f"<torch.npu.Stream device={self.device} npu_stream={self.stream_id:#x}>"


def _wrap(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A function, not a class: torch compares the times of its own events, and of no subclass's."""
    return torch.Event(device="npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def current_stream(device: DeviceLike = None) -> Stream:
    return _wrap(torch.accelerator.current_stream(_index(device)))


def default_stream(device: DeviceLike = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Makes ``stream`` the current one inside a ``with`` block; None changes nothing."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


StreamContext = stream


def is_current_stream_capturing() -> bool:
    return False


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_allocated(device: DeviceLike = None) -> int:
    return int(_C.memory(_index(device))[0])


def max_memory_allocated(device: DeviceLike = None) -> int:
    return int(_C.memory(_index(device))[1])


# Nothing is cached, so that what is reserved is what is allocated.
memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    _C.reset_peak_memory(_index(device))


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    _C.memory(_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Bytes that are free, and bytes that there are."""
    allocated, _, limit = _C.memory(_index(device))
    total = _TOTAL_BYTES if limit < 0 else limit
    return max(total - allocated, 0), total


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    allocated, peak, _ = _C.memory(_index(device))
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    return {f"{kind}.all.{which}": n for kind in kinds for which, n in (("current", allocated), ("peak", peak))}


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    return "\n".join(f"{name:32} {value:16,}" for name, value in memory_stats(device).items())


def empty_cache() -> None:
    """Nothing is cached."""


def ipc_collect() -> None:
    """Nothing is shared between processes."""


# ---- random numbers --------------------------------------------------------------------------------------------------


class _Generators:
    """The default generators, by device index; made on first use: the device may be registered after the import."""

    def __getitem__(self, index: int) -> torch.Generator:
        if not 0 <= index < device_count():
            raise IndexError(f"npu:{index} does not exist, there are {device_count()} devices")
        return _C.default_generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generators[index].manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: DeviceLike = "npu") -> Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: Tensor, device: DeviceLike = "npu") -> None:
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- mixed precision and overflow ------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enabled: bool) -> None:
    torch.set_autocast_enabled("npu", enabled)


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("npu", dtype)


def get_soc_version() -> int:
    """The number of the chip: 220, an Ascend 910B, or where it saturates 104, an Ascend 910A."""
    return 220 if is_support_inf_nan() else 104


def is_support_inf_nan() -> bool:
    """Whether arithmetic has inf and NaN, as since the 910B; False where it saturates and raises a flag."""
    return int(_C.settings()[0]) == 0


def get_npu_overflow_flag() -> bool:
    """Whether a result on the current device has saturated since the flag was cleared. Waits for the device."""
    if is_support_inf_nan():
        raise RuntimeError(
            "a chip with inf and nan has no overflow flag (on hardware: since the 910B); use npu_check_overflow, or "
            "npu_simulator.configure(saturate='fp16') to simulate an older one"
        )
    _C.count_device_to_host(32)
    return bool(_C.overflow_flag(current_device()))


def clear_npu_overflow_flag() -> None:
    if is_support_inf_nan():
        warnings.warn("clear_npu_overflow_flag does nothing on a chip with inf and nan", stacklevel=2)
        return
    _C.clear_overflow_flag(current_device())


def npu_check_overflow(grad: Tensor | float) -> bool:
    """Whether ``grad`` holds an inf or NaN, or, on a chip without them, whether the flag is up, which it clears."""
    if is_support_inf_nan():
        total = torch.as_tensor(grad).float().sum()
        return not bool(torch.isfinite(total))
    flag = get_npu_overflow_flag()
    if flag:
        clear_npu_overflow_flag()
    return flag


# ---- switches of the real one that change nothing here ---------------------------------------------------------------


def set_compile_mode(jit_compile: bool = False) -> None:
    """Operators are not compiled."""


def is_jit_compile_false() -> bool:
    return True


def set_option(option: dict[str, Any]) -> None:
    """Options of the compiler of operators."""


config = SimpleNamespace(allow_internal_format=False)
matmul = SimpleNamespace(allow_hf32=False)
conv = SimpleNamespace(allow_hf32=True)


# torch.npu.FloatTensor & co.
globals().update(type_names())


# ---- submodules ------------------------------------------------------------------------------------------------------


class autocast(torch.amp.autocast):
    """``torch.autocast("npu", ...)``, float16 by default."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("npu", ...)``; ``dynamic`` is torch_npu's word for growing and backing off."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        if not dynamic:
            growth_factor, backoff_factor, growth_interval = 1.0 + 1e-12, 1.0 - 1e-12, sys.maxsize
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def _submodule(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(f"torch_npu.npu.{name}")
    vars(module).update(attributes)
    for prefix in ("torch.npu", "torch_npu.npu"):
        sys.modules[f"{prefix}.{name}"] = module
    return module


_autocast_mode = _submodule("amp.autocast_mode", autocast=autocast)
_grad_scaler = _submodule("amp.grad_scaler", GradScaler=GradScaler)
amp = _submodule(
    "amp", autocast=autocast, GradScaler=GradScaler, autocast_mode=_autocast_mode, grad_scaler=_grad_scaler
)
amp.__path__ = []  # a package: `import torch_npu.npu.amp.grad_scaler` works
utils = _submodule(
    "utils",
    get_soc_version=get_soc_version,
    is_support_inf_nan=is_support_inf_nan,
    is_bf16_supported=is_bf16_supported,
    get_npu_overflow_flag=get_npu_overflow_flag,
    clear_npu_overflow_flag=clear_npu_overflow_flag,
    npu_check_overflow=npu_check_overflow,
    synchronize=synchronize,
    set_device=set_device,
    current_device=current_device,
    device=device,
    device_of=device_of,
)
streams = _submodule("streams", Stream=Stream, Event=Event)
random = _submodule(
    "random", manual_seed=manual_seed, manual_seed_all=manual_seed_all, get_rng_state=get_rng_state,
    set_rng_state=set_rng_state, initial_seed=initial_seed, seed=seed, seed_all=seed_all,
)  # fmt: skip
memory = _submodule(
    "memory", memory_allocated=memory_allocated, max_memory_allocated=max_memory_allocated,
    memory_reserved=memory_reserved, max_memory_reserved=max_memory_reserved, empty_cache=empty_cache,
    memory_stats=memory_stats, mem_get_info=mem_get_info, reset_peak_memory_stats=reset_peak_memory_stats,
)  # fmt: skip
__path__: list[str] = []
