# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What each way does to the public scripts, and whether the result trains: ``results.csv``, a row for each.

    MIGRATE_SCRIPTS=clones PYTHONPATH=.:tests python -m migrate.public.table [--gpu2ascend FILE] [SCRIPT...]

runs them where the vendor's torch_npu is installed, over the CANN of ``tests/host_cann``, and replaces the rows of the
scripts named, or of all. ``--gpu2ascend`` is Ascend's ms_fmk_transplt.py, whose output is run, too. Then
``PYTHONPATH=tests python -m migrate.guide`` writes the table of the guide.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from apex_npu.migrate import Options
from apex_npu.migrate.engine.program import count

from .catalogue import SCRIPTS, Script
from .harness import fetch, losses_of, migrated, why_not

RESULTS = Path(__file__).with_name("results.csv")
WAYS = ("migrate", "run", "transfer_to_npu", "GPU2Ascend")
_RUN = ["-m", "apex_npu", "run"]
_DEVICE = "host_cann"
_REPORTED = ("unsupported_api.csv", "unknown_api.csv")


@dataclass(frozen=True)
class Row:
    """One way of one script.

    Attributes:
        script: Its name in the catalogue.
        way: One of ``WAYS``.
        changed: How many places are changed in files; "" where none are.
        left: How many are reported as not changed.
        result: "trains", with the losses of the CPU; "other losses"; or the last line of the error.
    """

    script: str
    way: str
    changed: str
    left: str
    result: str


def read() -> list[Row]:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def _write(rows: list[Row]) -> None:
    order = [script.name for script in SCRIPTS]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in sorted(rows, key=lambda r: (order.index(r.script), WAYS.index(r.way))))


def _result(expected: list[list[float]], run: Callable[[], list[list[float]]]) -> str:
    try:
        losses = run()
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error: " in line and not line.startswith(" ")]
        return lines[-1][:160] if lines else "fails"
    pairs = [(one[0], two[0]) for one, two in zip(losses, expected, strict=True)]
    return "trains" if all(abs(one - two) <= 1e-5 * abs(two) for one, two in pairs) else "other losses"


def _rows(script: Script, folder: Path, gpu2ascend: Path | None) -> list[Row]:
    before = _RUN if script.knows_apex else []
    original = fetch(script, folder / "original")
    expected = losses_of(script, original, "cpu", before)
    made = migrated(original, folder / "migrated", Options(("D", "X")))
    changed, left = count(made.findings, "changed"), count(made.findings, "refused", "unsure")
    trains = _result(expected, lambda: losses_of(script, folder / "migrated", _DEVICE))
    rows = [Row(script.name, "migrate", str(changed), str(left), trains)]
    trains = _result(expected, lambda: losses_of(script, original, _DEVICE, [*_RUN, "--device", "npu"]))
    rows.append(Row(script.name, "run", "", "", trains))
    trains = _result(expected, lambda: losses_of(script, original, _DEVICE, before, SCRIPT_TRANSFER="1"))
    rows.append(Row(script.name, "transfer_to_npu", "", "", trains))
    if gpu2ascend is not None:
        rows.append(_of_gpu2ascend(script, original, folder / "ascend", expected, gpu2ascend))
    return rows


def _of_gpu2ascend(script: Script, original: Path, out: Path, expected: list[list[float]], gpu2ascend: Path) -> Row:
    out.mkdir()
    paths = os.pathsep.join([str(gpu2ascend.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(gpu2ascend), "-i", str(original), "-o", str(out), "-v", "2.8.0"],
        env={**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    made = out / f"{original.name}_msft"
    reports = made / "transplant_result_file"
    if done.returncode or not reports.is_dir():
        return Row(script.name, "GPU2Ascend", "", "", f"the tool fails: {(done.stdout + done.stderr)[-160:]}")
    changes = [row for row in _lines(reports / "change_list.csv") if {"MODIFY", "INSERT"} & {*row}]
    left = sum(len(_lines(reports / name)) for name in _REPORTED)
    before = _RUN if script.knows_apex else []
    trains = _result(expected, lambda: losses_of(script, made, _DEVICE, before))
    return Row(script.name, "GPU2Ascend", str(len(changes)), str(left), trains)


def _lines(path: Path) -> list[list[str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu2ascend", type=Path, metavar="FILE")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    options = parser.parse_args()
    for script in SCRIPTS:
        if options.scripts and script.name not in options.scripts:
            continue
        if reason := why_not(script):
            sys.exit(f"{script.name}: {reason}")
        with tempfile.TemporaryDirectory() as folder:
            rows = _rows(script, Path(folder), options.gpu2ascend)
        kept = [row for row in read() if row.script != script.name] if RESULTS.is_file() else []
        _write([*kept, *rows])
        print("\n".join(map(str, rows)), flush=True)


if __name__ == "__main__":
    main()
