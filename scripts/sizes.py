# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prints the lines of source per package, beside those of the last release. ``make lint`` runs this.

    python scripts/sizes.py --write 0.1.0

writes the present ones into ``scripts/sizes.csv``, as a release does.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "scripts" / "sizes.csv"
SUFFIXES = (".py", ".pyi", ".cpp", ".h")


def measure(root: Path = ROOT) -> dict[str, int]:
    """Lines of source by package, in the order of their names; ``apex_npu`` are the modules of no package."""
    sizes: dict[str, int] = {}
    for folder in ("apex_npu", "csrc", "tests", "benchmarks", "examples", "scripts"):
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root).parts
            if path.suffix in SUFFIXES and not {"build", "__pycache__"} & {*parts}:
                package = "/".join(parts[: 2 if folder == "apex_npu" and len(parts) > 2 else 1])
                sizes[package] = sizes.get(package, 0) + path.read_bytes().count(b"\n")
    return dict(sorted(sizes.items()))


def recorded() -> tuple[str, dict[str, int]]:
    """The last release, and its sizes."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        (_, release), *rows = csv.reader(file)
    return release, {name: int(lines) for name, lines in rows}


def main() -> None:
    """Print the table, or write the record."""
    sizes = measure()
    if sys.argv[1:2] == ["--write"]:
        with RECORD.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("package", sys.argv[2]), *sizes.items()])
        return
    release, before = recorded()
    rows = [(name, before.get(name, 0), sizes.get(name, 0)) for name in sorted({*before, *sizes})]
    library = [row for row in rows if row[0].startswith("apex_npu")]
    rows.append(("all of apex_npu", sum(row[1] for row in library), sum(row[2] for row in library)))
    width = max(len(row[0]) for row in rows)
    print(f"{'lines of source':{width}}  {release:>10}  {'now':>6}")
    for name, then, now in rows:
        print(f"{name:{width}}  {then:10}  {now:6}  {f'{now - then:+}' if now != then else ''}".rstrip())


if __name__ == "__main__":
    main()
