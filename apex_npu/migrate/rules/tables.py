# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables: names of torch.cuda and their counterparts in torch.npu, libraries that need CUDA, arguments for devices."""

from __future__ import annotations

# Public names of torch.cuda (torch 2.13) that `__all__` of torch_npu.npu (torch_npu 2.13, 2026-11) also has.
_SAME_NAMES = """
    BFloat16Storage BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor caching_allocator_alloc
    caching_allocator_delete can_device_access_peer change_current_allocator CharStorage CharTensor
    current_blas_handle current_device current_stream default_stream device device_count device_of DoubleStorage
    DoubleTensor empty_cache Event ExternalStream FloatStorage FloatTensor get_allocator_backend
    get_device_capability get_device_name get_device_properties get_per_process_memory_fraction get_rng_state
    get_rng_state_all get_sync_debug_mode graph graph_pool_handle HalfStorage HalfTensor host_memory_stats
    host_memory_stats_as_nested_dict init initial_seed IntStorage IntTensor ipc_collect is_available
    is_bf16_supported is_current_stream_capturing is_initialized LongStorage LongTensor make_graphed_callables
    manual_seed manual_seed_all max_memory_allocated max_memory_cached max_memory_reserved mem_get_info
    memory_allocated memory_cached memory_reserved memory_snapshot memory_stats memory_stats_as_nested_dict
    memory_summary MemPool reset_accumulated_host_memory_stats reset_accumulated_memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats reset_peak_memory_stats seed
    seed_all set_device set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream
    set_sync_debug_mode ShortStorage ShortTensor stream Stream StreamContext synchronize use_mem_pool utilization
"""
SAME_NAMES = frozenset(_SAME_NAMES.split())
# Names of torch.cuda that torch.npu has under another name.
RENAMED = {"CUDAGraph": "NPUGraph", "CUDAPluggableAllocator": "NPUPluggableAllocator"}
# Modules of torch.cuda that torch_npu.npu has as well, and the names in them.
SUBMODULES = {
    "amp": frozenset({"autocast", "GradScaler", "custom_fwd", "custom_bwd", "autocast_mode", "grad_scaler"}),
    "amp.autocast_mode": frozenset({"autocast", "custom_fwd", "custom_bwd"}),
    "amp.grad_scaler": frozenset({"GradScaler"}),
    "nvtx": frozenset({"mark", "range_end", "range_pop", "range_push", "range_start"}),
} | dict.fromkeys(("graphs", "memory", "random", "streams"), SAME_NAMES.union(RENAMED))
# Those that are only similar, and their names there. ``--similar`` changes them.
SIMILAR = {"nvtx": "mstx"}
# Names of torch.profiler, and the similar names of torch_npu.profiler.
_SAME_IN_PROFILER = (
    "ProfilerAction ProfilerActivity.CPU profile schedule supported_activities tensorboard_trace_handler"
)
PROFILER_NAMES = {name: name for name in _SAME_IN_PROFILER.split()}
PROFILER_NAMES["ProfilerActivity.CUDA"] = "ProfilerActivity.NPU"
# Advice for names without a counterpart.
INSTEAD = {
    "nvtx": "torch_npu.npu.mstx marks ranges for msprof. --similar uses it",
    "cudart": "remove the call: it asks the CUDA runtime",
    "nccl": "collectives go through torch.distributed with the backend hccl",
    "profiler": "use torch_npu.profiler",
    "get_arch_list": "remove the check: there are no CUDA architectures",
    "get_gencode_flags": "remove the check: there are no CUDA architectures",
    "list_gpu_processes": "npu-smi info lists processes",
    "temperature": "npu-smi info shows it",
    "power_draw": "npu-smi info shows it",
    "clock_rate": "npu-smi info shows it",
    "has_half": "every NPU computes in float16",
}
# Names that exist on npu and return something else.
ANSWERS = {
    "get_device_capability": "it returns None on npu",
    "get_device_properties": "major, minor and other properties are None or missing on npu",
    "DoubleTensor": "float64 is slow or not supported on npu",
}
# The device properties of CUDA that have a value in torch_npu (2026-11). The others are None or missing there.
NPU_PROPERTIES = frozenset({"L2_cache_size", "name", "total_memory"})

# Libraries and modules that need CUDA, and what to use instead.
NEEDS_CUDA = {
    "amp_C": "the optimizers of apex_npu.optimizers have kernels of their own",
    "bitsandbytes": "use optimizers of apex_npu, and layers of torch, unless its version supports npu",
    "cupy": "use torch, or numpy on the host",
    "flash_attn": "use torch.nn.functional.scaled_dot_product_attention, or torch_npu.npu_fusion_attention",
    "numba.cuda": "use torch, or an operator in Ascend C",
    "nvidia.dali": "use torch.utils.data with torchvision",
    "pycuda": "use torch, or an operator in Ascend C",
    "pynvml": "npu-smi info has the numbers",
    "tensorrt": "use ATC and the inference engine of CANN",
    "torch.distributed.ProcessGroupNCCL": "torch_npu has ProcessGroupHCCL",
    "torch.utils.cpp_extension.BuildExtension": "build with torch_npu.utils.cpp_extension",
    "torch.utils.cpp_extension.CUDAExtension": "build with torch_npu.utils.cpp_extension.NpuExtension",
    "torch.utils.cpp_extension.load": "compile the operator for the NPU beforehand",
    "torch.utils.cpp_extension.load_inline": "compile the operator for the NPU beforehand",
    "torch2trt": "use ATC and the inference engine of CANN",
    "transformer_engine": "use layers of torch with apex_npu.amp",
    "xformers": "use torch.nn.functional.scaled_dot_product_attention",
}
# Libraries whose arrays have a method cuda() of their own.
OTHER_LIBRARIES = frozenset({"cupy", "jax", "mxnet", "numba", "paddle", "tensorflow", "tf"})

# Callables of torch whose first argument is a device.
_OF_DEVICE = """
    Generator accelerator.set_device_index accelerator.synchronize amp.GradScaler amp.autocast
    amp.autocast_mode.autocast amp.grad_scaler.GradScaler amp.is_autocast_available autocast device
    distributed.device_mesh.DeviceMesh distributed.device_mesh.init_device_mesh get_autocast_dtype get_device_module
    is_autocast_enabled set_autocast_dtype set_autocast_enabled set_default_device
"""
# Callables that take a device, and its position from 0. DEVICE_KEYWORDS has the keywords.
DEVICE_ARGUMENTS = {f"torch.{name}": 0 for name in _OF_DEVICE.split()} | {"torch.jit.load": 1, "torch.load": 1}
DEVICE_KEYWORDS = frozenset({"map_location"})  # and all that contain "device"
DATA_LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
# Environment variables.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "ASCEND_RT_VISIBLE_DEVICES"}
# Prefixes of settings that have no effect on npu.
NO_EFFECT = ("torch.backends.cuda.", "torch.backends.cudnn.")
INT64 = "int64 is slow on npu: targets and indices may be int32"
# Names with a note: the rule that gives it, and its message.
NOTES = {
    "torch.int64": ("N703", INT64),
    "torch.long": ("N703", INT64),
    "torch.channels_last": ("N704", "an NPU has its own memory formats: this one saves nothing there"),
    "torch.version.cuda": ("D156", "it is None on npu"),
}

# Optimizers of torch.optim, the fused ones with the same rule, and their positional arguments.
FUSED = {
    "Adadelta": ("NpuFusedAdadelta", "params lr rho eps weight_decay"),
    "Adam": ("NpuFusedAdam", "params lr betas eps weight_decay amsgrad"),
    "AdamW": ("NpuFusedAdamW", "params lr betas eps weight_decay amsgrad"),
    "Muon": ("NpuFusedMuon", "params lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn"),
    "RMSprop": ("NpuFusedRMSprop", "params lr alpha eps weight_decay momentum centered"),
    "SGD": ("NpuFusedSGD", "params lr momentum dampening weight_decay nesterov"),
}
FUSED_KEYWORDS = frozenset({"maximize", "capturable"})
# Arguments that choose between torch's implementations of a rule.
FUSED_CHOICES = frozenset({"foreach", "fused"})
# Libraries with a training loop that calls backward and step.
TRAINERS = frozenset({"accelerate", "composer", "deepspeed", "fastai", "ignite", "lightning", "pytorch_lightning"})
