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
        found: What fills it in an explanation.
    """

    id: str
    title: str
    before: str
    after: str
    message: str = ""
    source: str = _NPU
    found: tuple[str, ...] = ()


_IMPORT = "import torch\nimport torch_npu  # noqa: F401\n"


def _torch(id: str, title: str, before: str, after: str, message: str = "", source: str = _NPU, *found: str) -> Rule:
    """A rule whose example begins with ``import torch``."""
    return Rule(id, title, f"import torch\n{before}\n", f"{_IMPORT}{after}\n", message, source, found)


def _left(id: str, title: str, program: str, message: str, *found: str, source: str = _NPU) -> Rule:
    """A rule that changes nothing."""
    return Rule(id, title, f"{program}\n", f"{program}\n", message, source, found)


DEVICE_RULES = (
    _torch("D101", "names of torch.cuda", "torch.cuda.synchronize()", "torch.npu.synchronize()"),
    Rule(
        "D102",
        "imports of torch.cuda",
        "from torch import cuda\n",
        "import torch_npu  # noqa: F401\nfrom torch import npu as cuda\n",
    ),
    _torch(
        "D103",
        "cuda() of tensors and modules",
        "x = torch.ones(2).cuda()",
        "x = torch.ones(2).npu()",
        "{} is a library with arrays of its own",
        _TORCH + "generated/torch.Tensor.cuda.html",
        "cupy",
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
        "use torch_npu.profiler, whose activity is NPU. --similar does",
    ),
    _torch("D111", "torch.cuda.amp", "scaler = torch.cuda.amp.GradScaler()", "scaler = torch.npu.amp.GradScaler()"),
    Rule(
        "D112",
        "environment variables",
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n',
        'import os\nos.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"\n',
        "{} has no effect on npu",
        found=("NCCL_DEBUG",),
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
        "nn.DataParallel",
    ),
    _left(
        "D151",
        "names of torch.cuda without a counterpart",
        "import torch\ntorch.cuda.nvtx.range_push('step')",
        "{} has no counterpart on npu",
        "torch.cuda.nvtx",
    ),
    _left(
        "D152",
        "what needs CUDA itself",
        "import flash_attn",
        "{} needs CUDA: {}",
        "flash_attn",
        "use torch.nn.functional.scaled_dot_product_attention",
    ),
    _left(
        "D153",
        "what is looked up by its name",
        'import torch\ncuda = getattr(torch, "cuda")',
        "{} is looked up or passed on: what becomes of it cannot be told. Write the npu name by hand",
        "'cuda'",
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
        "torch.backends.cudnn.benchmark",
    ),
    Rule(
        "D156",
        "names that answer otherwise",
        "import torch\nprint(torch.cuda.get_device_capability())\n",
        _IMPORT + "print(torch.npu.get_device_capability())\n",
        "{}",
        found=("it returns None on npu",),
    ),
    _left(
        "D159",
        "a file that speaks of npu already",
        'import torch\ndevice = "npu" if hasattr(torch, "npu") else torch.device("cuda")',
        "the file speaks of npu already (line {}): try it as it is, or give --force (run: --force-files)",
        "2",
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
    Rule(
        "X202",
        "the import of apex_npu",
        "import torch\nopt = torch.optim.SGD(params, 0.1)\n",
        "import torch\nfrom apex_npu import optimizers\nopt = optimizers.NpuFusedSGD(params, 0.1)\n",
        source="https://nvidia.github.io/apex/",
    ),
    Rule(
        "X203",
        "imports without a use",
        "import torch\nfrom torch.optim import SGD\nopt = SGD(params, 0.1)\n",
        "import torch\nfrom apex_npu import optimizers\nopt = optimizers.NpuFusedSGD(params, 0.1)\n",
        source="https://nvidia.github.io/apex/",
    ),
    _left(
        "X250",
        "names of apex without a counterpart",
        "from apex.transformer import parallel_state",
        "{} is no public name of apex_npu",
        "apex.transformer",
        source="https://nvidia.github.io/apex/",
    ),
)
OPTIMIZER_RULES = (
    Rule(
        "O501",
        "optimizers of torch.optim",
        "import torch\nopt = torch.optim.Adam(params, lr=1e-3)\n",
        "import torch\nfrom apex_npu import optimizers\nopt = optimizers.NpuFusedAdam(params, lr=1e-3)\n",
        "it is used as a class: a fused optimizer would have to take its place everywhere",
        _TORCH + "optim.html",
    ),
)
_TRAIN = """import torch
{top}model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
{made}for x in data:
    loss = model(x).sum()
{step}"""
_AMP_IMPORT, _AMP_MADE = "from apex_npu import amp\n", 'model, opt = amp.initialize(model, opt, opt_level="O1")\n'
_SCALED = "    with amp.scale_loss(loss, opt) as scaled_loss:\n        scaled_loss.backward()\n"
_STEP = "    opt.step()\n"


def _amp(
    id: str, title: str, before: str, after: str, message: str = "", *, head: str = "", end: str = "", ended: str = ""
) -> Rule:
    """A rule whose example is a loop: ``before`` comes ahead of the step, ``end`` after the loop."""
    old = _TRAIN.format(top="", made=head, step=before) + end
    new = _TRAIN.format(top=_AMP_IMPORT, made=_AMP_MADE, step=after) + (ended or end)
    return Rule(id, title, old, new, message, "https://nvidia.github.io/apex/amp.html")


def _no_amp(id: str, title: str, program: str, message: str = "") -> Rule:
    return _left(id, title, program, message, source="https://nvidia.github.io/apex/amp.html")


_PLAIN = "    loss.backward()\n" + _STEP
_CLIP = "    torch.nn.utils.clip_grad_norm_({}, 1.0)\n"
_SCALER = "scaler = torch.amp.GradScaler()\n"
_T402 = "    scaler.scale(loss).backward()\n    scaler.step(opt)\n    scaler.update()\n"
_SAVED = 'torch.save({{"opt": opt.state_dict(){}}}, path)\n'
_LOADED = 'saved = torch.load(path)\nopt.load_state_dict(saved["opt"])\n'
_LOADED_AMP = 'if "amp" in saved:\n    amp.load_state_dict(saved["amp"])\n'
_BCE = "    loss = torch.nn.functional.binary_cross_entropy(model(x){}, y)\n"
AMP_RULES = (
    _amp("A301", "amp.initialize", _PLAIN, _SCALED + _STEP),
    _amp("A302", "amp.scale_loss", _PLAIN, _SCALED + _STEP),
    _amp(
        "A303",
        "clipped gradients",
        "    loss.backward()\n" + _CLIP.format("model.parameters()") + _STEP,
        _SCALED + _CLIP.format("amp.master_params(opt)") + _STEP,
    ),
    _amp(
        "A304",
        "saved states",
        _PLAIN,
        _SCALED + _STEP,
        "amp.state_dict() is not saved beside it: training that goes on from here begins with the first loss scale",
        end=_SAVED.format(""),
        ended=_SAVED.format(', "amp": amp.state_dict()'),
    ),
    _amp(
        "A305",
        "loaded states",
        _PLAIN,
        _SCALED + _STEP,
        "amp.load_state_dict() is not called beside it: the loss scale begins with its first value",
        end=_LOADED,
        ended=_LOADED + _LOADED_AMP,
    ),
    _amp(
        "A306",
        "binary_cross_entropy, which takes no half precision",
        _BCE.format("") + _PLAIN,
        _BCE.format(".float()") + _SCALED + _STEP,
    ),
    _amp("T401", "GradScaler", _T402, _SCALED + _STEP, head=_SCALER),
    _amp("T402", "backward of a scaled loss", _T402, _SCALED + _STEP, head=_SCALER),
    _amp("T403", "step of a scaler", _T402, _SCALED + _STEP, head=_SCALER),
    _amp("T404", "update and unscale_ of a scaler", _T402, _SCALED + _STEP, head=_SCALER),
    _amp(
        "T405",
        "state of a scaler",
        _T402,
        _SCALED + _STEP,
        head=_SCALER,
        end="torch.save(scaler.state_dict(), path)\n",
        ended="torch.save(amp.state_dict(), path)\n",
    ),
    _amp(
        "T406",
        "autocast",
        '    with torch.autocast("cuda"):\n        loss = loss + model(x).mean()\n' + _PLAIN,
        "    loss = loss + model(x).mean()\n" + _SCALED + _STEP,
    ),
    _amp(
        "T407",
        "a scaler that is an argument",
        _T402,
        _SCALED + _STEP,
        head=_SCALER,
        end="def last(scaler):\n    scaler.update()\nlast(scaler)\n",
        ended="def last(scaler):\n    pass\nlast(None)\n",
    ),
    _no_amp("A350", "a program with amp", "from apex_npu import amp", "the program has amp already"),
    _no_amp("A351", "optimizers that cannot be told", "import torch\nopts = [torch.optim.Adam(model.parameters())]"),
    _no_amp("A352", "models that cannot be told", "import torch\nopt = torch.optim.Adam(model.head.parameters())"),
    _no_amp("A353", "backward or steps that cannot be told", "import torch\nif True: loss.backward()"),
    _no_amp(
        "A354",
        "other libraries, gradients and losses",
        "import accelerate\nloss.backward()\naccelerate.load()\nopt.step()",
    ),
    _no_amp("A355", "torch.amp that cannot be moved over", "import torch\ncast = torch.autocast('cuda')"),
)
_LOADED_DATA = """data = torch.utils.data.DataLoader(points, batch_size=8, {shuffle})
for epoch in range(3):
{epoch}    for x in data:
        loss = model(x).sum()
        loss.backward()
        opt.step()
torch.save(epoch, path)
"""
_ONE_CARD = """import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
""" + _LOADED_DATA.format(shuffle="shuffle=True", epoch="")
_THERE = "torch.distributed.is_initialized()"
_SEVERAL_CARDS = (
    """import torch
import torch_npu  # noqa: F401
import os
if "LOCAL_RANK" in os.environ:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("hccl")
model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
if torch.distributed.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
"""
    + _LOADED_DATA.format(
        shuffle=f"shuffle=not {_THERE}, "
        f"sampler=torch.utils.data.DistributedSampler(points, shuffle=True) if {_THERE} else None",
        epoch="    if isinstance(data.sampler, torch.utils.data.DistributedSampler):\n"
        "        data.sampler.set_epoch(epoch)\n",
    )
).replace("torch.save", f"if not {_THERE} or torch.distributed.get_rank() == 0:\n    torch.save")
_SEVERAL_CARDS += f"if {_THERE}:\n    torch.distributed.destroy_process_group()\n"


def _parallel(id: str, title: str, message: str = "") -> Rule:
    """A rule whose example is a script for one card."""
    return Rule(id, title, _ONE_CARD, _SEVERAL_CARDS, message, _TORCH + "notes/ddp.html")


PARALLEL_RULES = (
    _parallel("P601", "processes that join", "it trains on several cards already"),
    _parallel("P602", "the part of the data of each process"),
    _parallel("P603", "another order in each epoch"),
    _parallel("P604", "averaged gradients"),
    _parallel("P605", "files that one process writes"),
    _parallel("P606", "the import of os"),
    _parallel(
        "P607",
        "processes that leave",
        "the script exits here: call torch.distributed.destroy_process_group() before that if the group is initialized",
    ),
)
_DATA = "import torch\ndata = torch.utils.data.DataLoader(points, {})"
_FORM = "import torch\nmodel = model.to(memory_format=torch.channels_last)"
ADVICE_RULES = (
    _left(
        "N701",
        "pinned memory",
        _DATA.format("8, drop_last=True, pin_memory=True"),
        "it works on npu; where the host runs out of memory, leave it out",
    ),
    _left(
        "N702",
        "shapes that change",
        _DATA.format("8"),
        "the last batch may have another shape, which operators are compiled for: drop_last=True leaves it out",
    ),
    _left("N703", "int64", "y = y.long()", "int64 is slow on npu: targets and indices may be int32"),
    _left("N704", "channels_last", _FORM, "an NPU has memory formats of its own: this one saves nothing there"),
)
OWN_RULES = (
    _left("R801", "names that --rules gives", "import mylib", ""),
    _left("R802", "arguments that --rules gives", "import mylib", ""),
    _left("R803", "names that --rules refuses", "import mylib", "{} is refused by a rule of --rules", "mylib.kernel"),
    _left("R804", "names that --rules keeps", "import mylib", "a rule of --rules says so"),
    _left(
        "D170",
        "names of --api-list",
        "import mylib",
        "{} is in the list of APIs that are not supported",
        "torch.nn.Fold",
    ),
)
FILE_RULES = (
    _left("F901", "a file that does not parse", "x = (", ""),
    _left("F902", "a file for Python 2", "print 1", ""),
    _left("F903", "a file in another encoding", "# -*- coding: nosuch -*-", ""),
    _left("F904", "a file that is nested too deeply", "(" * 300, ""),
    _left("F905", "a file above 5 MB", "", ""),
    _left("F906", "a file that cannot be read", "", ""),
    _left("F908", "other files that name CUDA, nccl or apex", "", "{}: it is not changed", "CUDA_VISIBLE_DEVICES=0"),
    _left(
        "F909",
        "a fault of this program",
        "",
        "the new text is not the old one with these changes: the file is left. Please report this as a bug",
    ),
)
RULES = {
    rule.id: rule
    for rule in (
        *DEVICE_RULES,
        *APEX_RULES,
        *OPTIMIZER_RULES,
        *AMP_RULES,
        *PARALLEL_RULES,
        *ADVICE_RULES,
        *OWN_RULES,
        *FILE_RULES,
    )
}
