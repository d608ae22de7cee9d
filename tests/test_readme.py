# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The code and the commands of the README work unchanged."""

import re
from pathlib import Path

import pytest

import apex_npu
from apex_npu import amp
from apex_npu.__main__ import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


TO_TORCH_AMP, TO_APEX = blocks("diff")
BEFORE_IT = """
import torch
from torch.nn.utils import clip_grad_norm_

device = "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = torch.nn.MSELoss()
inputs = torch.randn(256, 4)
loader = [(inputs, inputs.sum(dim=1, keepdim=True))] * 100
"""


def side(diff: str, sign: str) -> str:
    """What is there before the change, or after it."""
    return "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] in (" ", sign))


def test_five_lines_change_in_a_script_for_torch_amp():
    losses = []
    for sign in "-+":
        names: dict[str, object] = {}
        exec(compile(BEFORE_IT + side(TO_TORCH_AMP, sign), "README.md", "exec"), names)
        losses.append(names["loss"].item())
    amp.shutdown()
    assert max(losses) < 0.1
    assert abs(losses[0] - losses[1]) < 0.02
    assert len(re.findall(r"^[+]", TO_TORCH_AMP, flags=re.MULTILINE)) == 5


def test_two_lines_change_in_a_script_for_apex():
    apex_npu.install_as_apex()
    try:
        names: dict[str, dict[str, object]] = {"-": {}, "+": {}}
        for sign, found in names.items():
            exec(side(TO_APEX, sign), found)
    finally:
        apex_npu.uninstall_apex()
    assert names["-"]["FusedAdam"] is names["+"]["FusedAdam"]
    for name in ("initialize", "scale_loss", "master_params", "state_dict"):
        assert callable(getattr(names["-"]["amp"], name))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:\]\(|(?:src|srcset)=\")([^)#\"]+)", README + CHINESE))))
def test_links_lead_somewhere(path):
    assert path.startswith("https://") or (ROOT / path).exists()


def test_the_chinese_readme_has_what_the_english_one_has():
    for language in ("sh", "diff"):
        assert set(blocks(language)) <= set(blocks(language, CHINESE))
    links = re.compile(r"\]\(([^)#]+)[^)]*\)")
    there = {path.replace(".zh.md", ".md") for path in links.findall(CHINESE)}
    assert set(links.findall(README)) - {"README.zh.md"} <= there
    levels = re.compile(r"^\| (`O\d`) \|", flags=re.MULTILINE)
    assert levels.findall(CHINESE) == levels.findall(README) == [f"`O{level}`" for level in range(6)]


def test_its_commands_are_those_of_the_package(tmp_path, capsys):
    """Each ``python -m apex_npu`` runs with the options that are shown."""
    commands = set(re.findall(r"python -m apex_npu (\w+)((?: --\w+)*)", README + CHINESE))
    assert commands == {("doctor", ""), ("run", ""), ("migrate", " --diff"), ("migrate", " --write")}
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nx = torch.ones(2).cuda()\n", encoding="utf-8")
    assert main(["migrate", "--diff", str(script)]) == 0
    assert "+x = torch.ones(2).npu()" in capsys.readouterr().out
    assert main(["migrate", "--write", "--backup", str(script)]) == 0  # it is in no repository
    assert ".npu()" in script.read_text(encoding="utf-8")


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    """``pip install apex-npu`` would install whatever somebody else registers under the name."""
    pages = [path for suffix in ("md", "py", "sh", "toml") for path in ROOT.glob(f"*.{suffix}")]
    for folder in ("apex_npu", "benchmarks", "docs", "examples", "patch", "scripts"):
        pages += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".sh")]
    command = re.compile(r"pip install (?:-\S+ )*[\"']?apex[-_]npu\b")
    assert [path for path in pages if command.search(path.read_text(encoding="utf-8"))] == []
    assert command.search('pip install --upgrade "apex-npu[timm]"')


def test_benchmarks_that_pages_start_are_there():
    pages = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md"]
    pages += [path for folder in ("docs", "benchmarks", "examples", "patch") for path in (ROOT / folder).rglob("*.md")]
    for page in pages:
        named = re.findall(r"\bbenchmarks/[\w/]+\.(?:py|sh)\b", page.read_text(encoding="utf-8"))
        assert not [path for path in named if not (ROOT / path).exists()], page


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = [ROOT / name for name in ("apex_npu", "docs", "scripts", "tests")]
    there = {path.as_posix() for folder in folders for path in folder.rglob("*.*")}
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|csv|md|txt))`", text) if "NAME" not in name}
    assert len(named) > 15
    assert {n for n in named if not (ROOT / n).exists() and not any(p.endswith(f"/{n}") for p in there)} == set()


def test_what_ci_runs_is_there():
    assert "make demo\nmake test\n" in blocks("sh")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"make ([a-z-]+)", README + CHINESE)) | {"test-all"} <= set(targets)


def test_the_changelog_begins_with_this_version_in_sections():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    assert newest.startswith(f"{apex_npu.__version__} ")
    sections = re.findall(r"^### (.*)$", newest, flags=re.MULTILINE)
    assert sections == [name for name in ("Added", "Changed", "Fixed") if name in sections] != []
    assert re.findall(r"^(?!- |  \S|###|$).+", newest.partition("\n")[2], flags=re.MULTILINE) == []
