# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A framework that is missing or too old is named, with the command that installs it."""

import importlib.metadata
import re

import pytest

from apex_npu.backends.requirements import require


@pytest.mark.parametrize(
    ("found", "oldest", "there"),
    [
        (None, "1.0", "it is not installed"),
        ("0.9.2", "1.0", "0.9.2 is installed"),
        ("0.10.7", "0.11", "0.10.7 is installed"),
        ("4.57.6", "5", "4.57.6 is installed"),
    ],
)
def test_what_is_missing_or_too_old(monkeypatch, found, oldest, there):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    text = f'apex_npu.integrations.timm needs timm >= {oldest} ({there}): pip install "timm>={oldest}"'
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        require("apex_npu.integrations.timm", "timm", oldest)


@pytest.mark.parametrize(
    ("found", "oldest"),
    [
        ("1.0", "1.0.0"),
        ("1.0.0", "1.0"),
        ("1.0.31", "1.0.9"),
        ("2.0.0rc1", "2.0"),
        ("2.13.0+cpu", "2.13"),
        ("10", "9.9"),
    ],
)
def test_what_is_new_enough(monkeypatch, found, oldest):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    require("apex_npu.integrations.timm", "timm", oldest)
