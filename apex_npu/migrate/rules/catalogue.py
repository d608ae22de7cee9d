# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data of the rules: titles and examples. ``--explain`` and the tables of the guide are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from apex_npu.migrate.engine.program import Options

from .own import EXAMPLES


def _loop(*step: str, made: str = "") -> str:
    """Return the source of a training loop with the statements ``step``."""
    lines = ["import torch", "model = torch.nn.Linear(2, 1)", "opt = torch.optim.Adam(model.parameters())", made]
    lines += ["for x in data:", "    loss = model(x).sum()", *(f"    {one}" for one in step)]
    return "\n".join(filter(None, lines))


_PLAIN = ("loss.backward()", "opt.step()")
_SCALED = _loop(
    *("scaler.scale(loss).backward()", "scaler.step(opt)", "scaler.update()"), made="scaler = torch.amp.GradScaler()"
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
# The title and an example of each rule.
_RULES: dict[str, tuple[str, str]] = {
    "D101": ("names of torch.cuda", "import torch\ntorch.cuda.synchronize()"),
    "D102": ("imports of torch.cuda", "from torch import cuda"),
    "D103": ("cuda() of tensors and modules", "import torch\nx = torch.ones(2).cuda()"),
    "D104": ("is_cuda of tensors", "import torch\non_device = torch.ones(2).is_cuda"),
    "D105": ("the name of a device", 'import torch\ndevice = torch.device("cuda:0")'),
    "D106": ("a string that may be a device", 'import torch\npick("cuda")'),
    "D107": ("a composed name of a device", 'import torch\ntorch.zeros(2, device=f"cuda:{rank}")'),
    "D108": ("tensor types by name", 'import torch\nx = torch.ones(2).type("torch.cuda.HalfTensor")'),
    "D109": ("the backend of torch.distributed", 'import torch\ntorch.distributed.init_process_group("nccl")'),
    "D110": ("the profiler", "import torch\ntorch.autograd.profiler.profile(use_cuda=True)"),
    "D111": ("torch.cuda.amp", "import torch\nscaler = torch.cuda.amp.GradScaler()"),
    "D112": ("environment variables", 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"'),
    "D113": ("the import of torch_npu", "import torch\ntorch.cuda.empty_cache()"),
    "D114": ("a class with a method cuda()", "class Batch:\n    def cuda(self):\n        return self"),
    "D150": ("DataParallel", "import torch\nmodel = torch.nn.DataParallel(model)"),
    "D151": ("names of torch.cuda without a counterpart", "import torch\ntorch.cuda.nvtx.range_push('step')"),
    "D152": ("names that need CUDA", "import flash_attn"),
    "D153": ("a name that is looked up", 'import torch\ncuda = getattr(torch, "cuda")'),
    "D154": ("an attribute is_cuda of the program", "class A:\n    is_cuda = True\nprint(A().is_cuda)"),
    "D155": ("settings of CUDA's libraries", "import torch\ntorch.backends.cudnn.benchmark = True"),
    "D156": ("names with other results", "import torch\nprint(torch.cuda.get_device_capability())"),
    "D159": (
        "a file that already names npu",
        'import torch\ndevice = "npu" if hasattr(torch, "npu") else torch.device("cuda")',
    ),
    "X201": ("imports of apex", "from apex import amp"),
    "X202": ("the import of apex_npu", "import torch\nopt = torch.optim.SGD(params, 0.1)"),
    "X203": ("unused imports", "import torch\nfrom torch.optim import SGD\nopt = SGD(params, 0.1)"),
    "X250": ("names of apex without a counterpart", "from apex.transformer import parallel_state"),
    "X251": (
        "arithmetic on 16-bit weights",
        'from apex_npu import amp\nmodel, opt = amp.initialize(model, opt, opt_level="O2")\n'
        "for p in model.parameters():\n    p.data.mul_(0.99)",
    ),
    "O501": ("optimizers of torch.optim", "import torch\nopt = torch.optim.Adam(params, lr=1e-3)"),
    "A301": ("amp.initialize", _loop(*_PLAIN)),
    "A302": ("amp.scale_loss", _loop(*_PLAIN)),
    "A303": (
        "clipped gradients",
        _loop("loss.backward()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "opt.step()"),
    ),
    "A304": ("saved states", _loop(*_PLAIN) + '\ntorch.save({"opt": opt.state_dict()}, path)'),
    "A305": ("loaded states", _loop(*_PLAIN) + '\nsaved = torch.load(path)\nopt.load_state_dict(saved["opt"])'),
    "A306": (
        "binary_cross_entropy, which rejects half precision",
        _loop("loss = torch.nn.functional.binary_cross_entropy(model(x), y)", *_PLAIN),
    ),
    "T401": ("GradScaler", _SCALED),
    "T402": ("backward of a scaled loss", _SCALED),
    "T403": ("step of a scaler", _SCALED),
    "T404": ("update and unscale_ of a scaler", _SCALED),
    "T405": ("state of a scaler", _SCALED + "\ntorch.save(scaler.state_dict(), path)"),
    "T406": ("autocast", _loop('with torch.autocast("cuda"):', "    loss = loss + model(x).mean()", *_PLAIN)),
    "T407": ("a scaler that is an argument", _SCALED + "\ndef last(scaler):\n    scaler.update()\nlast(scaler)"),
    "A350": ("a program that already uses amp", "from apex_npu import amp"),
    "A351": ("unclear optimizers", "import torch\nopts = [torch.optim.Adam(model.parameters())]"),
    "A352": ("unclear models", "import torch\nopt = torch.optim.Adam(model.head.parameters())"),
    "A353": ("an unclear backward or step", "import torch\nif True: loss.backward()"),
    "A354": (
        "other libraries, gradients and losses",
        "import accelerate\nloss.backward()\naccelerate.load()\nopt.step()",
    ),
    "A355": ("torch.amp that amp cannot replace", "import torch\ncast = torch.autocast('cuda')"),
    "P601": ("the start of the process group", _ONE_CARD),
    "P602": ("a part of the data for each process", _ONE_CARD),
    "P603": ("a new order in each epoch", _ONE_CARD),
    "P604": ("averaged gradients", _ONE_CARD),
    "P605": ("files that one process writes", _ONE_CARD),
    "P606": ("the import of os", _ONE_CARD),
    "P607": ("the end of the process group", _ONE_CARD),
    "N701": (
        "pinned memory",
        "import torch\ndata = torch.utils.data.DataLoader(points, 8, drop_last=True, pin_memory=True)",
    ),
    "N702": ("shapes that change", "import torch\ndata = torch.utils.data.DataLoader(points, 8)"),
    "N703": ("int64", "y = y.long()"),
    "N704": ("channels_last", "import torch\nmodel = model.to(memory_format=torch.channels_last)"),
    "R801": ("names that --rules gives", "import mylib\nx = mylib.to_cuda(x)"),
    "R802": (
        "arguments that --rules gives",
        "import torch\ndata = torch.utils.data.DataLoader(points, pin_memory=True)",
    ),
    "R803": ("names that --rules refuses", "import mylib\nmylib.kernel(x)"),
    "R804": ("names that --rules keeps", "import torch\ntorch.cuda.empty_cache()"),
    "D170": ("names of --api-list", "import torch\nfold = torch.nn.Fold(4, 2)"),
    "F901": ("a file that does not parse", "torch.cuda.synchronize("),
    "F903": ("a file in another encoding", "# -*- coding: nosuch -*-\nimport torch.cuda"),
    "F906": ("a file that cannot be read", ""),
    "F908": ("other files that name CUDA, nccl or apex", ""),
    "F909": ("an internal error", ""),
}
# What a rule refuses beyond its example.
_REFUSED: dict[str, tuple[str, ...]] = {
    "O501": (
        "arguments that the fused optimizer does not take, * and **",
        "classes that are passed on or subclassed",
        "optimizers of a program with sparse gradients",
    ),
    "A351": (
        "optimizers that are made at several places, in a loop, or by a function that is called several times",
        "a name that also gets an optimizer from elsewhere, or None",
        "an optimizer that is used before amp.initialize can be called",
    ),
    "A352": (
        "parameters of something else than a whole model that has a name",
        "a model that is moved, cast or wrapped in the wrong order. The order is: the model on its device, the "
        "optimizer, amp.initialize, DistributedDataParallel",
    ),
    "A353": (
        "a backward that is not a statement by itself, or that no step of an optimizer follows in its function",
        "a step with a closure, and gradients from torch.autograd or, at O1 and O2, of inputs",
        "gradients of another loss that zero_grad has not cleared",
    ),
    "A354": (
        "a library that trains, sharded parameters, and gradients that the program averages itself",
        "a BCELoss whose calls are unknown",
        "at O2 and O5, weights that processes share",
    ),
    "A355": (
        "a scaler that is passed to other code than functions of this file that scale, step and update with it",
        "a scaler with settings, or whose scale is read",
        "autocast that is kept in a variable, is for the CPU, is inside of autocast, or contains the backward",
        "autocast with settings that amp does not have, or to an unclear dtype",
        "a switch (enabled=...) that calls other functions than torch's is_..., has several expressions, or is not "
        "known where the optimizer is made",
    ),
    "P601": (
        "a program that already trains on several cards, or selects a card by its number",
        "models, optimizers and DataLoaders that are made before the processes join",
    ),
    "P602": (
        "a DataLoader with a sampler, of an IterableDataset, made in another file, or made in the loop",
        "data that are split without a seed",
    ),
    "P603": ("a loop over epochs without range",),
    "P604": (
        "DataParallel, and models that move after their optimizer is made",
        "attributes of a model that DistributedDataParallel hides",
    ),
    "P605": ("torch.save that is part of another statement, or gets an open file",),
}


@dataclass(frozen=True)
class Rule:
    """One rule. Its id is a letter for the family and a number."""

    id: str
    title: str
    example: str  # a whole program
    refused: tuple[str, ...] = ()  # what else the rule refuses

    @property
    def options(self) -> Options:
        """The options for rewriting the example."""
        if self.id[0] in "AT":
            return Options(amp="O1", ignore=("D", "O"))
        if self.id[0] == "P":
            return Options(data_parallel="main", ignore=("O",))
        if self.id[0] == "R" or self.id == "D170":
            return Options(own=EXAMPLES)
        return Options(select=("N",)) if self.id[0] == "N" else Options()


RULES = {id: Rule(id, title, example, _REFUSED.get(id, ())) for id, (title, example) in _RULES.items()}
