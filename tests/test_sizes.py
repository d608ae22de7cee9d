# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``scripts/sizes.py`` counts lines of source by package."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("sizes", ROOT / "scripts" / "sizes.py")
sizes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sizes)


def test_lines_are_counted_by_package_and_compared_with_the_record(tmp_path, monkeypatch, capsys):
    files = {
        "apex_npu/__init__.py": 2,
        "apex_npu/amp/scaler.py": 3,
        "apex_npu/amp/legacy/old.py": 4,
        "apex_npu/amp/notes.md": 50,
        "apex_npu/__pycache__/scaler.py": 50,
        "csrc/amp/overlay.cpp": 5,
        "tests/npu_simulator/build/made.py": 50,
        "tests/npu_simulator/csrc/npu.h": 6,
    }
    for name, lines in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("line\n" * lines)
    counted = sizes.measure(tmp_path)
    found = {"apex_npu": 2, "apex_npu/amp": 7, "csrc": 5, "tests": 6}
    assert {name: lines for name, lines in counted.items() if lines} == found

    record = tmp_path / "sizes.csv"
    record.write_text("package,1.0\napex_npu/amp,10\napex_npu/gone,1\n")
    monkeypatch.setattr(sizes, "RECORD", record)
    monkeypatch.setattr(sizes, "measure", lambda: counted)
    monkeypatch.setattr(sizes.sys, "argv", ["sizes.py"])
    sizes.main()
    rows = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in capsys.readouterr().out.splitlines()}
    assert rows["apex_npu/amp"] == ["10", "7", "-3"]
    assert rows["apex_npu/gone"] == ["1", "0", "-1"]
    assert rows["all of apex_npu"] == ["11", "9", "-2"]
