# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A patched copy of upstream in a folder of its own, which is there whole or not at all."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from . import eras
from .checkout import Checkout, git
from .errors import PipelineError
from .patching import State, inspect, set_state


def generate(source: str | None, ref: str | None, out: Path) -> str:
    """Clone upstream to ``out`` and patch it; an ``out`` that is there already is patched in place.

    Args:
        source: A folder or a URL; upstream's URL otherwise.
        ref: A commit, tag or branch, or the name of an era; a folder's HEAD, or the default era, otherwise.
        out: Where to.

    Returns:
        A line that says what has been done.

    Raises:
        PipelineError: It cannot be; ``out`` is as it was.
    """
    known = eras.load()
    era = known.named(ref) if ref is not None else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        there = Checkout(out)
        wanted = era.commit if era is not None else there.resolve(ref) if ref is not None else there.head
        if there.head != wanted:
            expected = f"{ref} ({(wanted or 'no such commit')[:12]})"
            raise PipelineError(f"expected {expected} in {out}, found {there.describe()}")
        return set_state(there, State.PATCHED)
    commit = era.commit if era is not None else ref
    if source is None or _is_url(source):
        source = source or known.url
        default = known.named(known.default)
        commit = commit or (default.commit if default is not None else None)
    else:
        source, commit = _local(Path(source), commit)
    return _clone(source, commit, out)


def _is_url(source: str) -> bool:
    return re.match(r"\w+://|[\w.-]+@[\w.-]+:", source) is not None


def _local(source: Path, commit: str | None) -> tuple[str, str | None]:
    """A folder, and its commit where none is wanted; then what has been edited in it would be lost."""
    if not source.exists():
        raise PipelineError(f"{source} does not exist: --source names a checkout of NVIDIA's Apex, or a URL")
    is_bare = (source / "HEAD").is_file() and not (source / ".git").exists()  # without files to edit
    if commit is None and not is_bare:
        checkout = Checkout(source)
        inspect(checkout)
        commit = checkout.head
    return str(source.resolve()), commit


def clone(source: str, target: Path) -> None:
    """Clone without files, which come with the bytes of their commit."""
    git("clone", "--quiet", "--no-checkout", "--config", "core.autocrlf=false", "--", source, str(target))


def _clone(source: str, commit: str | None, out: Path) -> str:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            unfinished = Path(folder) / out.name
            try:
                clone(source, unfinished)
                checkout = Checkout(unfinished)
                found = checkout.resolve(commit or "HEAD")
                if found is None:
                    raise PipelineError(f"{source} has no commit, tag or branch {commit!r}")
                git("checkout", "--quiet", "--detach", found, cwd=unfinished)
                said = set_state(Checkout(unfinished), State.PATCHED)
            except PipelineError as error:
                raise PipelineError(str(error).replace(str(unfinished.resolve()), str(out.resolve()))) from None
            said = said.replace(str(unfinished.resolve()), str(out.resolve()))
            unfinished.rename(out)
    except OSError as error:
        raise PipelineError(f"{out} cannot be written ({error.strerror}): nothing has been left there") from error
    return said
