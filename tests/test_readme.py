# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code and the commands of the README work unchanged."""

import re
from pathlib import Path

import pytest
import torch

import apex_npu

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")


# A page in Chinese stands for the one in English.
LINKED = {path.replace(".zh.md", ".md") for path in re.findall(r"\]\(([^)]+)\)", CHINESE)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_training_loop_runs_and_learns(capsys):
    (loop,) = blocks("python")
    torch.manual_seed(0)
    exec(compile(loop, "README.md", "exec"), {"__name__": "__main__"})
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert float(last_line.removeprefix("loss ")) < 0.1


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", README + CHINESE))))
def test_links_lead_somewhere(path):
    assert path.startswith("https://") or (ROOT / path).exists()


def test_the_chinese_readme_shows_the_same_code_and_names_the_same_things():
    code = re.compile(r"^```.*?^```$|^    \S.*?$", flags=re.DOTALL | re.MULTILINE)
    assert code.findall(CHINESE) == code.findall(README)
    assert [len(re.findall(start, CHINESE, flags=re.MULTILINE)) for start in ("^## ", "^- ", "^  [|] ")] == [
        len(re.findall(start, README, flags=re.MULTILINE)) for start in ("^## ", "^- ", "^  [|] ")
    ]
    assert set(re.findall(r"\]\(([^)]+)\)", README)) - {"README.zh.md"} <= LINKED
    levels = re.compile(r"^\| (`O\d`) \|", flags=re.MULTILINE)
    assert levels.findall(CHINESE) == levels.findall(README)
    named = set(re.findall(r"`(\w*(?:Fused\w+|Lamb))`", README))
    assert len(named) > 12
    assert named <= set(re.findall(r"`(\w+)`", CHINESE))


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    """``pip install apex-npu`` would install whatever somebody else registers under the name."""
    pages = [path for suffix in ("md", "py", "sh", "toml") for path in ROOT.glob(f"*.{suffix}")]
    for folder in ("apex_npu", "benchmarks", "docs", "examples", "patch", "scripts"):
        pages += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".sh")]
    command = re.compile(r"pip install (?:-\S+ )*[\"']?apex[-_]npu\b")
    assert [path for path in pages if command.search(path.read_text(encoding="utf-8"))] == []
    assert command.search('pip install --upgrade "apex-npu[timm]"')


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [ROOT / name for name in ("apex_npu", "docs", "scripts", "tests")]
    there = {path.as_posix() for folder in folders for path in folder.rglob("*.*")}
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|csv|md|txt))`", text) if "NAME" not in name}
    assert len(named) > 15
    assert {n for n in named if not (ROOT / n).exists() and not any(p.endswith(f"/{n}") for p in there)} == set()


def test_commands_are_two_targets_of_the_makefile():
    (commands,) = blocks("sh")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert commands.split("\n") == ["make demo", "make test", ""]
    assert {"demo", "test", "test-all"} <= set(targets)


def test_the_changelog_begins_with_this_version_in_sections():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    assert newest.startswith(f"{apex_npu.__version__} ")
    sections = re.findall(r"^### (.*)$", newest, flags=re.MULTILINE)
    assert sections == [name for name in ("Added", "Changed", "Fixed") if name in sections] != []
    assert re.findall(r"^(?!- |  \S|###|$).+", newest.partition("\n")[2], flags=re.MULTILINE) == []
