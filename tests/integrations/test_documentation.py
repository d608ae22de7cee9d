# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The blocks of docs/hosts.md run."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from torch import nn

import apex_npu

TEXT = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")
SECTIONS = {
    title.split(" ")[0].lower(): re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
}
IMPORTED = {
    "lightning": "lightning.pytorch",
    "mmengine": "mmengine.runner",
    "ignite": "ignite.engine",
    "fastai": "fastai.basics",
}


class Dictionaries(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"inputs": torch.full((4,), index / 16), "labels": torch.zeros(2)}


class Network(nn.Linear):
    """Also what a Trainer of transformers takes."""

    def forward(self, inputs, labels=None):
        output = super().forward(inputs)
        return output if labels is None else {"loss": (output.float() - labels).square().mean()}


def lightning_module():
    from integrations.lightning_module import Module, loader

    return {"module": Module(torch.optim.SGD), "loader": loader()}


def loaders():
    from fastai.basics import DataLoader, DataLoaders

    data = [(torch.ones(4), torch.zeros(2))] * 16
    return {"dls": DataLoaders(DataLoader(data, bs=8), DataLoader(data, bs=8))}


MORE = {"lightning": lightning_module, "fastai": loaders}


def skip_if_too_old(host):
    try:
        importlib.import_module(f"apex_npu.integrations.{host}")
    except ModuleNotFoundError:
        return  # it has no integration of ours
    except ImportError as error:
        if " needs " not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the blocks are for any device")
@pytest.mark.parametrize("host", SECTIONS)
def test_blocks(host, tmp_path):
    pytest.importorskip(
        IMPORTED.get(host, host), reason=f"{host} is not installed: make setup-hosts", exc_type=ImportError
    )
    skip_if_too_old(host)
    apex_npu.install_as_apex()
    try:
        for block in SECTIONS[host]:
            model = Network(4, 2)
            names = {
                "model": model,
                "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
                "loss_fn": nn.MSELoss(),
                "inputs": torch.ones(8, 4),
                "batches": [(torch.ones(8, 4), torch.zeros(8, 2))],
                "dataset": Dictionaries(),
                "output_dir": str(tmp_path),
                "options": {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
                **MORE.get(host, dict)(),
            }
            exec(block, names)
    finally:
        apex_npu.uninstall_apex()


def test_each_integration_is_documented():
    folder = Path(apex_npu.__file__).parent / "integrations"
    for path in folder.glob("*.py"):
        if "require(" in path.read_text(encoding="utf-8") and path.stem != "requirements":
            assert f"apex_npu.integrations.{path.stem}" in TEXT
