# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A tree of each era."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline import synthetic


@pytest.fixture(params=synthetic.ERAS)
def era(request) -> str:
    return request.param


@pytest.fixture
def tree(era: str, tmp_path: Path) -> Path:
    """In a folder whose name holds a space."""
    return synthetic.write(tmp_path / "an apex", synthetic.files(era))


@pytest.fixture
def tree_2025(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "an apex", synthetic.files("2025"))
