# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For mkdocs: the pages of the site are those of the repository, and what is made from the names of the packages.

Pages keep their places in the repository, so that links between them hold in both. mkdocstrings fills pages of the
optimizers and of the API from docstrings. Pages in Chinese have a navigation and a header in Chinese.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section

# By jieba the search finds Chinese words; it is not to print how it loads its dictionary.
logging.getLogger("jieba").setLevel(logging.WARNING)

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "LICENSE", "docs/*", "docs/guides/*", "*/README.md")
PAGES += ("benchmarks/*/README.md", "examples/*/README.md", "scripts/*/README.md")
CHINESE = "中文"
_LANGUAGES = {"en": ("English", "README.md"), "zh": (CHINESE, "README.zh.md")}
# In the results of a search older names for what amp and the optimizers do come last.
_LAST = "---\nsearch:\n  boost: 0.1\n---\n\n"
_FIRST = ("initialize", "scale_loss", "master_params", "last_step", "state_dict", "load_state_dict")
# A picture for light and for dark pages, as the pages on GitHub have it.
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<stem>.*)_dark\.svg">\s*'
    r'<img alt="(?P<alt>.*)" src="(?P=stem)_light\.svg" width="(?P<width>\d+)"></picture>'
)


def on_files(files: Files, config: Any) -> Files:
    """All pages, and what they show, in place of what ``docs_dir`` has."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    patterns = (*PAGES, "benchmarks/results/*.svg")
    found = sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})
    pages = [File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, False) for path in found]
    made = [File.generated(config, uri, content=content) for uri, content in (*_optimizers(), *_reference(config))]
    return Files([*kept, *pages, *made])


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """First pages get a tagline, and buttons in place of the line of links; pictures follow the theme's own switch."""
    words = config.extra["landing"].get(page.file.src_uri)
    if words:
        page.meta["hide"] = ["toc"]
        markdown = landing(markdown, **words)
    return PICTURE.sub(both, markdown)


def both(found: re.Match[str]) -> str:
    """Two images, of which the theme shows one."""
    image = "![{alt}]({stem}_{theme}.svg#only-{theme}){{ width={width} }}"
    return "\n".join(image.format(theme=theme, **found.groupdict()) for theme in ("light", "dark"))


def landing(text: str, tagline: str, buttons: dict[str, str]) -> str:
    """``text`` with the tagline and the buttons."""
    title, _, sentence, rest = text.split("\n\n", 3)
    marks = [".md-button .md-button--primary", *[".md-button"] * (len(buttons) - 1)]
    links = [f"[{label}]({path}){{ {mark} }}" for mark, (label, path) in zip(marks, buttons.items(), strict=True)]
    return "\n\n".join([title, f"{tagline}\n{{ .tagline }}", sentence, " ".join(links), rest])


def _optimizers() -> Iterator[tuple[str, str | bytes]]:
    """A page for each optimizer, with its path through Rosenbrock's valley where there is one."""
    folder = ROOT / "build/site/optimizers"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, ROOT / "examples/rosenbrock.py", "--each", folder], check=True, cwd=ROOT)
    for name in _classes("optimizers"):
        text = f"::: apex_npu.optimizers.{name}\n    options:\n      heading_level: 1\n      members: false\n"
        if (folder / f"{name}.png").exists():
            text += f"\n## Path through Rosenbrock's valley\n\n![Minimum, start and steps of {name}]({name}.png)\n"
            yield f"optimizers/{name}.png", (folder / f"{name}.png").read_bytes()
        yield f"optimizers/{name}.md", text


def _reference(config: Any) -> Iterator[tuple[str, str]]:
    """A page for each package that scripts import."""
    for package, about in config.extra["reference"].items():
        module = importlib.import_module(f"apex_npu.{package}")
        if package == "optimizers":
            lines = [f"- [{name}](../optimizers/{name}.md)" for name in _classes(package)]
        else:
            names = [*(name for name in _FIRST if name in module.__all__), *module.__all__]
            shown = [getattr(module, name) for name in dict.fromkeys(names)]
            own = [one for one in shown if inspect.isclass(one) or inspect.isfunction(one)]
            own = [one for one in own if one.__module__.startswith("apex_npu")]
            own.sort(key=inspect.isclass)  # functions first
            lines = [f"::: {one.__module__}.{one.__qualname__}" for one in own]
        head = _LAST if about.startswith("Apex's") else ""
        yield f"reference/{package}.md", "\n".join([f"{head}# apex_npu.{package}\n", about, "", *lines, ""])


def _classes(package: str) -> list[str]:
    module = importlib.import_module(f"apex_npu.{package}")
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name))]


def on_page_context(context: dict[str, Any], page: Any, config: Any, nav: Navigation) -> dict[str, Any]:
    """Called before ``page`` is rendered."""
    (chinese,) = (item for item in nav.items if isinstance(item, Section) and item.title == CHINESE)
    own = page.file.src_uri
    language, other = ("zh", "en") if own.endswith(".zh.md") else ("en", "zh")
    config.theme["language"] = language
    pages = {found.file.src_uri: found for found in nav.pages}
    twin = own.replace(".zh.md", ".md") if language == "zh" else own.removesuffix(".md") + ".zh.md"
    name, first = _LANGUAGES[other]
    context["other_language"] = {"lang": other, "name": name, "url": pages.get(twin, pages[first]).url}
    items = chinese.children if language == "zh" else [item for item in nav.items if item is not chinese]
    context["nav"] = Navigation(items, nav.pages)
    context["nav"].homepage = pages[_LANGUAGES[language][1]]
    return context
