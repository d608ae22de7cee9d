# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lays out the pages of the documentation site.

    python scripts/site_pages.py build/site/pages

The pages of the repository keep their places, so that links between them hold in both. Pages of the optimizers and the
API reference are made from the names that the packages export; mkdocstrings fills them from the docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "LICENSE",
    "docs/*",
    "docs/guides/*",
    "benchmarks/README.md",
    "benchmarks/results/*.svg",
    "examples/*/README.md",
    "patch/README.md",
    "scripts/docker/README.md",
    "tests/README.md",
)
REFERENCE = {
    "amp": "Mixed precision: `from apex_npu import amp`.",
    "debug": "Diagnostics: `amp.debug` ([what they print](../docs/debug.md)).",
    "optimizers": "",
    "export": "ONNX files, and weights from files: `from apex_npu import export`.",
    "fp16_utils": "Apex's `fp16_utils`: `from apex_npu import fp16_utils`.",
    "normalization": "Apex's norms: `from apex_npu import normalization`.",
    "parallel": "Apex's `parallel`: `from apex_npu import parallel`.",
    "multi_tensor_apply": "Apex's lists of tensors: `from apex_npu import multi_tensor_apply`.",
}
# A picture for light and for dark pages, as the pages on GitHub have it.
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<stem>.*)_dark\.svg">\s*'
    r'<img alt="(?P<alt>.*)" src="(?P=stem)_light\.svg" width="(?P<width>\d+)"></picture>'
)
_LANDING = {
    "README.md": (
        "Mixed precision and fused optimizers for PyTorch",
        {
            "Get started": "docs/getting_started.md",
            "Guides": "docs/guides/amp.md",
            "From apex": "docs/migrating.md",
            "From CUDA": "docs/migrating_cuda.md",
            "Benchmarks": "benchmarks/README.md",
        },
    ),
    "README.zh.md": (
        "面向 PyTorch 的混合精度与融合优化器",
        {
            "入门": "docs/getting_started.zh.md",
            "从 CUDA 迁移": "docs/migrating_cuda.zh.md",
            "从 Apex 迁移": "docs/migrating.zh.md",
            "没有 NPU": "docs/without_an_npu.zh.md",
        },
    ),
}
# Older names for what amp and the optimizers do: in the results of a search they come after those.
_FIRST = ("initialize", "scale_loss", "master_params", "last_step", "state_dict", "load_state_dict")
_LAST_IN_SEARCH = "---\nsearch:\n  boost: 0.1\n---\n\n"


def copy_pages(target: Path) -> None:
    """The pages of the repository, and what they show."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                copy = target / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".md":
                    text = _PICTURE.sub(_both, path.read_text(encoding="utf-8"))
                    copy.write_text(landing(path.name, text) if path.parent == ROOT else text, encoding="utf-8")
                else:
                    shutil.copyfile(path, copy)


def _both(found: re.Match[str]) -> str:
    """The theme shows one of two images, by its own switch and not by the browser's preference."""
    image = "![{alt}]({stem}_{theme}.svg#only-{theme}){{ width={width} }}"
    return "\n".join(image.format(theme=theme, **found.groupdict()) for theme in ("light", "dark"))


def landing(name: str, text: str) -> str:
    """A first page with a tagline, and with buttons in place of the line of links; other pages as they are."""
    if name not in _LANDING:
        return text
    tagline, buttons = _LANDING[name]
    title, _, sentence, rest = text.split("\n\n", 3)
    links = " ".join(
        f"[{label}]({path}){{ .md-button{' .md-button--primary' if i == 0 else ''} }}"
        for i, (label, path) in enumerate(buttons.items())
    )
    return "\n\n".join(["---\nhide: [toc]\n---", title, f"{tagline}\n{{ .tagline }}", sentence, links, rest])


def write_optimizers(target: Path) -> None:
    """One page for each optimizer, with its path through Rosenbrock's valley where there is one."""
    folder = target / "optimizers"
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, ROOT / "examples" / "rosenbrock.py", "--each", folder], check=True, cwd=ROOT)
    for name in _classes("optimizers"):
        path = f"\n## Path through Rosenbrock's valley\n\n![Minimum, start and steps of {name}]({name}.png)\n"
        (folder / f"{name}.md").write_text(
            f"::: apex_npu.optimizers.{name}\n    options:\n      heading_level: 1\n      members: false\n"
            + (path if (folder / f"{name}.png").exists() else ""),
            encoding="utf-8",
        )


def write_reference(target: Path) -> None:
    """One page for each package that scripts import."""
    folder = target / "reference"
    folder.mkdir(parents=True)
    for package, about in REFERENCE.items():
        module = importlib.import_module(f"apex_npu.{package}")
        if package == "optimizers":
            listed = "\n".join(f"- [{name}](../optimizers/{name}.md)" for name in _classes(package))
            text = f"Each optimizer has a page:\n\n{listed}\n"
        else:
            names = [*(name for name in _FIRST if name in module.__all__), *module.__all__]
            shown = [getattr(module, name) for name in dict.fromkeys(names)]
            own = [
                found
                for found in shown
                if (inspect.isclass(found) or inspect.isfunction(found)) and found.__module__.startswith("apex_npu")
            ]
            own.sort(key=inspect.isclass)  # functions first
            text = f"{about}\n\n" + "\n".join(f"::: {found.__module__}.{found.__qualname__}\n" for found in own)
        head = _LAST_IN_SEARCH if text.startswith("Apex's") else ""
        (folder / f"{package}.md").write_text(f"{head}# apex_npu.{package}\n\n{text}", encoding="utf-8")


def _classes(package: str) -> list[str]:
    module = importlib.import_module(f"apex_npu.{package}")
    return [name for name in module.__all__ if inspect.isclass(getattr(module, name))]


def main() -> None:
    """Lay the pages out in the folder that is named, which is made again."""
    sys.path.insert(0, str(ROOT))
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    copy_pages(target)
    write_optimizers(target)
    write_reference(target)


if __name__ == "__main__":
    main()
