# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data: the rules. Each has an example that is tested; reports and the guide's tables are made of them."""

from __future__ import annotations

from dataclasses import dataclass

from apex_npu.migrate.engine.program import NOT_THE_SAME, Options

_TORCH = "https://docs.pytorch.org/docs/stable/"
# Where the behaviour is documented, by family.
_SOURCES = {
    "X": "https://nvidia.github.io/apex/",
    "A": "https://nvidia.github.io/apex/amp.html",
    "T": "https://nvidia.github.io/apex/amp.html",
    "P": _TORCH + "notes/ddp.html",
}


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: A letter for the family, and a number.
        title: What it is about.
        example: A whole program.
        message: What the report says; ``{}`` is filled in with what was found.
        found: What fills it in an explanation.
        url: Where the behaviour is documented, if that is not said of the family.
    """

    id: str
    title: str
    example: str
    message: str = ""
    found: tuple[str, ...] = ()
    url: str = ""

    @property
    def source(self) -> str:
        """Where the behaviour is documented."""
        return self.url or _SOURCES.get(self.id[0], "https://www.hiascend.com/document/detail/zh/Pytorch/")

    @property
    def options(self) -> Options:
        """With which the example is rewritten."""
        if self.id[0] in "AT":
            return Options(amp="O1", ignore=("D", "O"))
        if self.id[0] == "P":
            return Options(data_parallel="main", ignore=("O",))
        return Options(select=("N",)) if self.id[0] == "N" else Options()


DEVICE_RULES = (
    Rule("D101", "names of torch.cuda", "import torch\ntorch.cuda.synchronize()"),
    Rule("D102", "imports of torch.cuda", "from torch import cuda"),
    Rule(
        "D103",
        "cuda() of tensors and modules",
        "import torch\nx = torch.ones(2).cuda()",
        "{} is a library with arrays of its own",
        found=("cupy",),
        url=_TORCH + "generated/torch.Tensor.cuda.html",
    ),
    Rule("D104", "is_cuda of tensors", "import torch\non_device = torch.ones(2).is_cuda"),
    Rule(
        "D105",
        "a device by its name",
        'import torch\ndevice = torch.device("cuda:0")',
        url=_TORCH + "tensor_attributes.html",
    ),
    Rule(
        "D106",
        "a text that could be a device's name",
        'import torch\npick("cuda")',
        "whether this is a device's name cannot be told here. --unsure applies it",
    ),
    Rule(
        "D107",
        "a device's name that is composed",
        'import torch\ntorch.zeros(2, device=f"cuda:{rank}")',
        "the text is in several pieces: write it as one",
    ),
    Rule("D108", "tensor types by name", 'import torch\nx = torch.ones(2).type("torch.cuda.HalfTensor")'),
    Rule(
        "D109",
        "the backend of torch.distributed",
        'import torch\ntorch.distributed.init_process_group("nccl")',
        "as a key this may be a name of the program's own",
    ),
    Rule(
        "D110",
        "the profiler",
        "import torch\ntorch.autograd.profiler.profile(use_cuda=True)",
        "use torch_npu.profiler, whose activity is NPU. --similar does",
    ),
    Rule("D111", "torch.cuda.amp", "import torch\nscaler = torch.cuda.amp.GradScaler()"),
    Rule(
        "D112",
        "environment variables",
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"',
        "{} has no effect on npu",
        found=("NCCL_DEBUG",),
    ),
    Rule(
        "D113",
        "the import of torch_npu",
        "import torch\ntorch.cuda.empty_cache()",
        "torch is not imported at the top level here: the script has to import torch_npu first",
    ),
    Rule(
        "D114",
        "a class with a method cuda()",
        "class Batch:\n    def cuda(self):\n        return self",
        "the class has a name npu already: calls of cuda() become calls of that",
    ),
    Rule(
        "D150",
        "DataParallel",
        "import torch\nmodel = torch.nn.DataParallel(model)",
        "{} does not run on npu. Start one process per device (torchrun) and wrap with DistributedDataParallel",
        found=("nn.DataParallel",),
    ),
    Rule(
        "D151",
        "names of torch.cuda without a counterpart",
        "import torch\ntorch.cuda.nvtx.range_push('step')",
        "{} has no counterpart on npu",
        found=("torch.cuda.nvtx",),
    ),
    Rule(
        "D152",
        "what needs CUDA itself",
        "import flash_attn",
        "{} needs CUDA: {}",
        found=("flash_attn", "use torch.nn.functional.scaled_dot_product_attention"),
    ),
    Rule(
        "D153",
        "what is looked up by its name",
        'import torch\ncuda = getattr(torch, "cuda")',
        "{} is looked up or passed on: what becomes of it cannot be told. Write the npu name by hand",
        found=("'cuda'",),
    ),
    Rule(
        "D154",
        "an attribute is_cuda of the program",
        "class A:\n    is_cuda = True\nprint(A().is_cuda)",
        "the program has an attribute is_cuda of its own: if this is a tensor's, write is_npu",
    ),
    Rule(
        "D155",
        "settings of CUDA's libraries",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "{} has no effect on npu",
        found=("torch.backends.cudnn.benchmark",),
    ),
    Rule(
        "D156",
        "names that answer otherwise",
        "import torch\nprint(torch.cuda.get_device_capability())",
        "{}",
        found=("it returns None on npu",),
    ),
    Rule(
        "D159",
        "a file that speaks of npu already",
        'import torch\ndevice = "npu" if hasattr(torch, "npu") else torch.device("cuda")',
        "the file speaks of npu already (line {}): try it as it is, or give --force (run: --force-files)",
        found=("2",),
    ),
)
APEX_RULES = (
    Rule("X201", "imports of apex", "from apex import amp"),
    Rule("X202", "the import of apex_npu", "import torch\nopt = torch.optim.SGD(params, 0.1)"),
    Rule("X203", "imports without a use", "import torch\nfrom torch.optim import SGD\nopt = SGD(params, 0.1)"),
    Rule(
        "X250",
        "names of apex without a counterpart",
        "from apex.transformer import parallel_state",
        "{} is no public name of apex_npu",
        found=("apex.transformer",),
    ),
)
OPTIMIZER_RULES = (
    Rule(
        "O501",
        "optimizers of torch.optim",
        "import torch\nopt = torch.optim.Adam(params, lr=1e-3)",
        "it is used as a class: a fused optimizer would have to take its place everywhere",
        url=_TORCH + "optim.html",
    ),
)


def _loop(*step: str, made: str = "") -> str:
    """A program whose loop has the statements ``step``."""
    lines = ["import torch", "model = torch.nn.Linear(2, 1)", "opt = torch.optim.Adam(model.parameters())", made]
    lines += ["for x in data:", "    loss = model(x).sum()", *(f"    {one}" for one in step)]
    return "\n".join(filter(None, lines))


_PLAIN = ("loss.backward()", "opt.step()")
_SCALED = _loop(
    *("scaler.scale(loss).backward()", "scaler.step(opt)", "scaler.update()"), made="scaler = torch.amp.GradScaler()"
)
AMP_RULES = (
    Rule("A301", "amp.initialize", _loop(*_PLAIN)),
    Rule("A302", "amp.scale_loss", _loop(*_PLAIN)),
    Rule(
        "A303",
        "clipped gradients",
        _loop("loss.backward()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "opt.step()"),
    ),
    Rule(
        "A304",
        "saved states",
        _loop(*_PLAIN) + '\ntorch.save({"opt": opt.state_dict()}, path)',
        "amp.state_dict() is not saved beside it: training that goes on from here begins with the first loss scale",
    ),
    Rule(
        "A305",
        "loaded states",
        _loop(*_PLAIN) + '\nsaved = torch.load(path)\nopt.load_state_dict(saved["opt"])',
        "amp.load_state_dict() is not called beside it: the loss scale begins with its first value",
    ),
    Rule(
        "A306",
        "binary_cross_entropy, which takes no half precision",
        _loop("loss = torch.nn.functional.binary_cross_entropy(model(x), y)", *_PLAIN),
    ),
    Rule("T401", "GradScaler", _SCALED),
    Rule("T402", "backward of a scaled loss", _SCALED),
    Rule("T403", "step of a scaler", _SCALED),
    Rule("T404", "update and unscale_ of a scaler", _SCALED),
    Rule("T405", "state of a scaler", _SCALED + "\ntorch.save(scaler.state_dict(), path)"),
    Rule("T406", "autocast", _loop('with torch.autocast("cuda"):', "    loss = loss + model(x).mean()", *_PLAIN)),
    Rule("T407", "a scaler that is an argument", _SCALED + "\ndef last(scaler):\n    scaler.update()\nlast(scaler)"),
    Rule("A350", "a program with amp", "from apex_npu import amp", "the program has amp already"),
    Rule("A351", "optimizers that cannot be told", "import torch\nopts = [torch.optim.Adam(model.parameters())]"),
    Rule("A352", "models that cannot be told", "import torch\nopt = torch.optim.Adam(model.head.parameters())"),
    Rule("A353", "backward or steps that cannot be told", "import torch\nif True: loss.backward()"),
    Rule(
        "A354",
        "other libraries, gradients and losses",
        "import accelerate\nloss.backward()\naccelerate.load()\nopt.step()",
    ),
    Rule("A355", "torch.amp that cannot be moved over", "import torch\ncast = torch.autocast('cuda')"),
)
_ONE_CARD = """import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(points, batch_size=8, shuffle=True)
for epoch in range(3):
    for x in data:
        loss = model(x).sum()
        loss.backward()
        opt.step()
torch.save(epoch, path)"""
PARALLEL_RULES = (
    Rule("P601", "processes that join", _ONE_CARD, "it trains on several cards already"),
    Rule("P602", "the part of the data of each process", _ONE_CARD),
    Rule("P603", "another order in each epoch", _ONE_CARD),
    Rule("P604", "averaged gradients", _ONE_CARD),
    Rule("P605", "files that one process writes", _ONE_CARD),
    Rule("P606", "the import of os", _ONE_CARD),
    Rule(
        "P607",
        "processes that leave",
        _ONE_CARD,
        "the script exits here: call torch.distributed.destroy_process_group() before that if the group is initialized",
    ),
)
ADVICE_RULES = (
    Rule(
        "N701",
        "pinned memory",
        "import torch\ndata = torch.utils.data.DataLoader(points, 8, drop_last=True, pin_memory=True)",
        "it works on npu; where the host runs out of memory, leave it out",
    ),
    Rule(
        "N702",
        "shapes that change",
        "import torch\ndata = torch.utils.data.DataLoader(points, 8)",
        "the last batch may have another shape, which operators are compiled for: drop_last=True leaves it out",
    ),
    Rule("N703", "int64", "y = y.long()", "int64 is slow on npu: targets and indices may be int32"),
    Rule(
        "N704",
        "channels_last",
        "import torch\nmodel = model.to(memory_format=torch.channels_last)",
        "an NPU has memory formats of its own: this one saves nothing there",
    ),
)
OWN_RULES = (
    Rule("R801", "names that --rules gives", "import mylib"),
    Rule("R802", "arguments that --rules gives", "import mylib"),
    Rule(
        "R803",
        "names that --rules refuses",
        "import mylib",
        "{} is refused by a rule of --rules",
        found=("mylib.kernel",),
    ),
    Rule("R804", "names that --rules keeps", "import mylib", "a rule of --rules says so"),
    Rule(
        "D170",
        "names of --api-list",
        "import mylib",
        "{} is in the list of APIs that are not supported",
        found=("torch.nn.Fold",),
    ),
)
FILE_RULES = (
    Rule("F901", "a file that does not parse", "x = ("),
    Rule("F902", "a file for Python 2", "print 1"),
    Rule("F903", "a file in another encoding", "# -*- coding: nosuch -*-"),
    Rule(
        "F904",
        "a file that is nested too deeply",
        "((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((",
    ),
    Rule("F905", "a file above 5 MB", ""),
    Rule("F906", "a file that cannot be read", ""),
    Rule(
        "F908",
        "other files that name CUDA, nccl or apex",
        "",
        "{}: it is not changed",
        found=("CUDA_VISIBLE_DEVICES=0",),
    ),
    Rule("F909", "a fault of this program", "", NOT_THE_SAME),
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
