# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The documentation site has a place for every page, and the code of its guides runs."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch

from apex_npu import amp, optimizers
from apex_npu.__main__ import main

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]


def pages_of(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in pages_of(value)]
    return [page for value in entry for page in pages_of(value)] if isinstance(entry, list) else [str(entry)]


CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
NAV = pages_of(CONFIG["nav"])


def test_every_page_has_a_place():
    docs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert docs <= set(NAV)
    assert {path.name for path in ROOT.glob("*.md")} <= set(NAV)
    examples = {f"examples/{path.parent.name}/README.md" for path in (ROOT / "examples").glob("*/main.py")}
    assert len(examples) == 4
    assert examples <= set(NAV)
    written = [page for page in NAV if not page.startswith(("optimizers/", "reference/"))]
    assert [page for page in written if not (ROOT / page).is_file()] == []


def test_the_site_asks_for_neither_triton_nor_the_simulated_npu():
    planned = subprocess.run(["make", "-n", "docs"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "environment.py '.venv' site\n" in planned
    assert "simulator" not in planned


def test_the_search_works_in_files_without_a_network():
    assert "offline" in CONFIG["plugins"]
    scripts = CONFIG["extra"]["polyfills"]
    assert any("iframe-worker" in script for script in scripts)  # else the plugin names one of another site
    assert [path for path in [*scripts, *CONFIG["extra_css"]] if not (ROOT / path).is_file()] == []


def test_the_search_finds_chinese_words():
    (search,) = [plugin["search"] for plugin in CONFIG["plugins"] if "search" in plugin]
    words = "损失\u200b缩放\u3002\u200b溢出"  # as jieba divides them
    assert [word for word in re.split(search["separator"], words) if word] == ["损失", "缩放", "溢出"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


@pytest.fixture
def hooks(script):
    pytest.importorskip("mkdocs", reason="the site is built with what make setup-docs installs")
    return script("site_hooks")


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_first_pages_begin_with_a_tagline_and_buttons(name, hooks):
    text = (ROOT / name).read_text(encoding="utf-8")
    page = hooks.landing(text, **CONFIG["extra"]["landing"][name])
    assert re.match(r"# apex_npu\n\n.+\n\{ \.tagline \}\n\n.*apex_npu", page)
    buttons = re.findall(r"\[[^]]+\]\(([^)]+)\)\{ \.md-button(?: \.md-button--primary)? \}", page)
    assert len(buttons) >= 4
    assert [path for path in buttons if path not in NAV] == []
    assert page.endswith(text.split("\n\n", 3)[3])


@pytest.mark.parametrize(
    "page", ["README.md", "benchmarks/README.md", "docs/guides/memory.md", "docs/guides/memory.zh.md"]
)
def test_the_theme_chooses_between_light_and_dark_pictures(page, hooks):
    text = (ROOT / page).read_text(encoding="utf-8")
    changed = hooks.PICTURE.sub(hooks.both, text)
    shown = [found["stem"] for found in hooks.PICTURE.finditer(text)]
    assert len(shown) == text.count("<picture>") > 0
    assert "<picture>" not in changed
    for theme in ("light", "dark"):
        assert re.findall(rf"\((.*)_{theme}\.svg#only-{theme}\)", changed) == shown


def test_pages_in_chinese_have_a_navigation_of_their_own(hooks):
    from mkdocs.structure.nav import Navigation, Section

    names = ["README.md", "docs/amp.md", "docs/debug.md", "README.zh.md", "docs/amp.zh.md"]
    pages = {
        name: SimpleNamespace(file=SimpleNamespace(src_uri=name), url=f"to {name}", is_homepage=False) for name in names
    }
    english, chinese = [pages[name] for name in names[:3]], [pages[name] for name in names[3:]]
    nav = Navigation([*english, Section(hooks.CHINESE, chinese)], list(pages.values()))
    config = SimpleNamespace(theme={})

    def shown(name):
        context = hooks.on_page_context({}, pages[name], config, nav)
        return config.theme["language"], context["nav"].items, context["other_language"]["url"]

    assert shown("docs/amp.md") == ("en", english, "to docs/amp.zh.md")
    assert shown("docs/amp.zh.md") == ("zh", chinese, "to docs/amp.md")
    assert shown("docs/debug.md") == ("en", english, "to README.zh.md")  # there is none of it
    assert [entry for entry in CONFIG["nav"] if hooks.CHINESE in entry]


def test_every_optimizer_has_a_page():
    classes = {f"optimizers/{name}.md" for name in optimizers.__all__ if isinstance(getattr(optimizers, name), type)}
    assert {page for page in NAV if page.startswith("optimizers/")} == classes


@pytest.mark.parametrize("page", ["getting_started.md", "getting_started.zh.md"])
def test_getting_started_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    amp.shutdown()
    loss = re.search(r"loss ([\d.]+), step applied: True", capsys.readouterr().out)
    assert loss is not None
    assert float(loss[1]) < 4.0  # targets have a variance of 8


def guide(page: str) -> list[str]:
    text = (ROOT / "docs/guides" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


# What each block prints last.
PRINTED = {
    "amp": [r"loss 0\.0\d\d", "True", r"\[\d+\.0, \d+\.0\]", r"torch\.float32"],
    "optimizers": [r"loss 0\.0\d\d", "True", "True", r"\[True, False\]", "True"],
    "memory": [r"\{'exp_avg': torch\.bfloat16, .*\}", r"torch\.bfloat16", ".*(O5|rows).*", "cpu"],
    "debug": [r"False \['body\.weight', .*\]", "advice: .*|    .*", ".*"],
    "distributed": [r"rank \d: (-?\d+\.\d+)", r"rank \d: (-?\d+\.\d+)", r"rank \d: (\(32, 8\) of \(64, 8\))"],
}


@pytest.mark.parametrize(
    ("page", "block"), [(page, i) for page in PRINTED if page != "distributed" for i in range(len(guide(page)))]
)
def test_each_block_of_a_guide_runs_alone(page, block, capsys, monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(guide(page)[block], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), {"__name__": "__main__"})
    amp.shutdown()
    assert re.fullmatch(PRINTED[page][block], capsys.readouterr().out.rstrip().splitlines()[-1])


LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
@pytest.mark.parametrize("block", range(len(guide("distributed"))))
def test_each_block_of_the_guide_to_several_processes_runs_alone(block, tmp_path):
    script = tmp_path / "train.py"
    # gloo's threads may abort a process whose interpreter exits (processes.leave).
    script.write_text(guide("distributed")[block] + LEAVE, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": processes.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=processes.HANG_TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(PRINTED["distributed"][block], done.stdout)
    assert len(found) == 2
    assert found[0] == found[1]  # of both processes


def test_each_guide_is_run_and_leads_to_its_reference():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/guides").glob("*.md")}
    assert set(texts) == {f"{page}{language}.md" for page in PRINTED for language in ("", ".zh")}
    guides = {page: texts[f"{page}.md"] for page in PRINTED}
    for page in PRINTED:
        assert re.search(rf"\[参考\]\(\.\./{page}(\.zh)?\.md\)", texts[f"{page}.zh.md"])
    for page, text in guides.items():
        assert f"[reference](../{page}.md)" in text
        assert len(guide(page)) == text.count("```python") == len(PRINTED[page])
        assert set(re.findall(r"python -m apex_npu (\w+)", text)) <= {"bench", "compare", "doctor", "run"}


def test_checkpoints_prints_what_it_shows(capsys, monkeypatch, tmp_path):
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    code, shown, contents = re.findall(r"```(?:python)?\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "checkpoints.md", "exec"), {"__name__": "__main__"})
    amp.shutdown()
    assert capsys.readouterr().out == shown
    assert main(["convert", "checkpoint.pth"]) == 0
    assert capsys.readouterr().out == contents.partition("\n")[2]


def test_the_chinese_guides_show_the_same_code():
    pages = ("getting_started", "installing", "amp", "without_an_npu", "faq", "migrating")
    for page in (*pages, *(f"guides/{page}" for page in PRINTED)):
        english, chinese = (
            (ROOT / "docs" / f"{page}{language}.md").read_text(encoding="utf-8") for language in ("", ".zh")
        )
        assert re.findall(r"```.*?```", chinese, re.DOTALL) == re.findall(r"```.*?```", english, re.DOTALL)
        for start in ("^#+ ", "^- ", "^[|] ", r"^\d\. "):
            assert len(re.findall(start, chinese, re.MULTILINE)) == len(re.findall(start, english, re.MULTILINE)), page
