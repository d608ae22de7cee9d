# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data: the rules. Each has an example that is tested; reports and the guide's tables are made of them."""

from __future__ import annotations

from dataclasses import dataclass

_TORCH = "https://docs.pytorch.org/docs/stable/"
_NPU = "https://www.hiascend.com/document/detail/zh/Pytorch/"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: A letter for the family, and a number.
        title: What it is about.
        before: An example, a whole program.
        after: The same program rewritten; equal to ``before`` where the rule reports alone.
        message: What the report says; ``{}`` is filled in with what was found.
        source: Where the behaviour is documented.
    """

    id: str
    title: str
    before: str
    after: str
    message: str = ""
    source: str = _NPU


_IMPORT = "import torch\nimport torch_npu  # noqa: F401\n"


def _torch(id: str, title: str, before: str, after: str, message: str = "", source: str = _NPU) -> Rule:
    """A rule whose example begins with ``import torch``."""
    return Rule(id, title, f"import torch\n{before}\n", f"{_IMPORT}{after}\n", message, source)


def _left(id: str, title: str, program: str, message: str, source: str = _NPU) -> Rule:
    """A rule that changes nothing."""
    return Rule(id, title, f"{program}\n", f"{program}\n", message, source)


DEVICE_RULES = (
    _torch("D101", "names of torch.cuda", "torch.cuda.synchronize()", "torch.npu.synchronize()"),
    Rule(
        "D102",
        "imports of torch.cuda",
        "from torch import cuda\n",
        "import torch_npu  # noqa: F401\nfrom torch import npu as cuda\n",
        "{} has no counterpart on npu: the import stays as it is",
    ),
    _torch(
        "D103",
        "cuda() of tensors and modules",
        "x = torch.ones(2).cuda()",
        "x = torch.ones(2).npu()",
        "{} is a library with arrays of its own",
        _TORCH + "generated/torch.Tensor.cuda.html",
    ),
    _torch("D104", "is_cuda of tensors", "on_device = torch.ones(2).is_cuda", "on_device = torch.ones(2).is_npu"),
    _torch(
        "D105",
        "a device by its name",
        'device = torch.device("cuda:0")',
        'device = torch.device("npu:0")',
        source=_TORCH + "tensor_attributes.html",
    ),
    _left(
        "D106",
        "a text that could be a device's name",
        'import torch\npick("cuda")',
        "whether this is a device's name cannot be told here. --unsure applies it",
    ),
    _torch(
        "D107",
        "a device's name that is composed",
        'torch.zeros(2, device=f"cuda:{rank}")',
        'torch.zeros(2, device=f"npu:{rank}")',
        "the text is in several pieces: write it as one",
    ),
    _torch(
        "D108",
        "tensor types by name",
        'x = torch.ones(2).type("torch.cuda.HalfTensor")',
        'x = torch.ones(2).type("torch.npu.HalfTensor")',
    ),
    _torch(
        "D109",
        "the backend of torch.distributed",
        'torch.distributed.init_process_group("nccl")',
        'torch.distributed.init_process_group("hccl")',
        "as a key this may be a name of the program's own",
    ),
    _torch(
        "D110",
        "the profiler",
        "torch.autograd.profiler.profile(use_cuda=True)",
        'torch.autograd.profiler.profile(use_device="npu")',
        "use torch_npu.profiler, whose activity is NPU",
    ),
    _torch("D111", "torch.cuda.amp", "scaler = torch.cuda.amp.GradScaler()", "scaler = torch.npu.amp.GradScaler()"),
    Rule(
        "D112",
        "environment variables",
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n',
        'import os\nos.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"\n',
        "{} has no effect on npu",
    ),
    _torch(
        "D113",
        "the import of torch_npu",
        "torch.cuda.empty_cache()",
        "torch.npu.empty_cache()",
        "torch is not imported at the top level here: the script has to import torch_npu first",
    ),
    Rule(
        "D114",
        "a class with a method cuda()",
        "class Batch:\n    def cuda(self):\n        return self\n",
        "class Batch:\n    def cuda(self):\n        return self\n    npu = cuda\n",
        "the class has a name npu already: calls of cuda() become calls of that",
    ),
    _left(
        "D150",
        "DataParallel",
        "import torch\nmodel = torch.nn.DataParallel(model)",
        "{} does not run on npu. Start one process per device (torchrun) and wrap with DistributedDataParallel",
    ),
    _left(
        "D151",
        "names of torch.cuda without a counterpart",
        "import torch\ntorch.cuda.nvtx.range_push('step')",
        "{} has no counterpart on npu",
    ),
    _left("D152", "what needs CUDA itself", "import flash_attn", "{} needs CUDA: "),
    _left(
        "D153",
        "what is looked up by its name",
        'import torch\ncuda = getattr(torch, "cuda")',
        "{} is looked up or passed on: what becomes of it cannot be told. Write the npu name by hand",
    ),
    _left(
        "D154",
        "an attribute is_cuda of the program",
        "class A:\n    is_cuda = True\nprint(A().is_cuda)",
        "the program has an attribute is_cuda of its own: if this is a tensor's, write is_npu",
    ),
    _left(
        "D155",
        "settings of CUDA's libraries",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "{} has no effect on npu",
    ),
    Rule(
        "D156",
        "names that answer otherwise",
        "import torch\nprint(torch.cuda.get_device_capability())\n",
        _IMPORT + "print(torch.npu.get_device_capability())\n",
        "{}",
    ),
    _left(
        "D159",
        "a file that speaks of npu already",
        'import torch\ndevice = "npu" if hasattr(torch, "npu") else torch.device("cuda")',
        "the file speaks of npu already (line {}): try it as it is, or give --force",
    ),
)
APEX_RULES = (
    Rule(
        "X201",
        "imports of apex",
        "from apex import amp\n",
        "from apex_npu import amp\n",
        source="https://nvidia.github.io/apex/",
    ),
    _left(
        "X250",
        "names of apex without a counterpart",
        "from apex.transformer import parallel_state",
        "{} is no public name of apex_npu",
        "https://nvidia.github.io/apex/",
    ),
)
FILE_RULES = (
    _left("F901", "a file that does not parse", "x = (", ""),
    _left("F902", "a file for Python 2", "print 1", ""),
    _left("F903", "a file in another encoding", "# -*- coding: nosuch -*-", ""),
    _left("F904", "a file that is nested too deeply", "(" * 300, ""),
    _left("F905", "a file above 5 MB", "", ""),
    _left("F906", "a file that cannot be read", "", ""),
    _left("F908", "other files that name CUDA, nccl or apex", "", "{}: it is not changed"),
    _left(
        "F909",
        "a fault of this program",
        "",
        "the new text is not the old one with these changes: the file is left. Please report this as a bug",
    ),
)
RULES = {rule.id: rule for rule in (*DEVICE_RULES, *APEX_RULES, *FILE_RULES)}
