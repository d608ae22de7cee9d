# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An incompatible extension is disabled with one warning, and the pure-PyTorch fallback is used."""

import ast
import types
from pathlib import Path

import pytest
import torch

from apex_npu import _extension


@pytest.fixture
def note(tmp_path, monkeypatch):
    monkeypatch.delenv("APEX_NPU_NO_EXT", raising=False)
    note = tmp_path / "_C.torch_version"
    note.write_text(f"{torch.__version__}\n")
    return note


def test_built_for_another_torch(note):
    note.write_text("1.0.0\n")
    with pytest.warns(RuntimeWarning, match=r"torch 1\.0\.0.*rebuild"):
        assert _extension.load(note) is None


def test_not_built(tmp_path):
    assert _extension.load(tmp_path / "missing") is None


def test_does_not_load(note, monkeypatch):
    def undefined_symbol(name):
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(_extension.importlib, "import_module", undefined_symbol)
    with pytest.warns(RuntimeWarning, match="undefined symbol: _ZN3c10"):
        assert _extension.load(note) is None


def test_of_another_version_of_this_package(note, monkeypatch):
    monkeypatch.setattr(_extension.importlib, "import_module", lambda name: types.SimpleNamespace(API=0))
    with pytest.warns(RuntimeWarning, match="another version"):
        assert _extension.load(note) is None


@pytest.mark.parametrize(("value", "skipped"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_switched_off(note, monkeypatch, value, skipped):
    monkeypatch.setenv("APEX_NPU_NO_EXT", value)
    module = types.SimpleNamespace(API=_extension._API)
    monkeypatch.setattr(_extension.importlib, "import_module", lambda name: module)
    assert _extension.load(note) is (None if skipped else module)


@pytest.mark.skipif(_extension.extension is None, reason="there is no extension")
def test_what_is_there_is_what_its_types_say():
    stub = Path(_extension.__file__).with_name("_C.pyi")
    declared = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign):
            declared[node.target.id] = set()
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            members = node.body if isinstance(node, ast.ClassDef) else []
            declared[node.name] = {m.name for m in members if isinstance(m, ast.FunctionDef)} - {"__init__"}
    module = _extension.extension
    assert set(declared) == {name for name in dir(module) if not name.startswith("__")}
    for name, members in declared.items():
        if isinstance(getattr(module, name), type):
            assert members == {m for m in vars(getattr(module, name)) if not m.startswith("_")}
