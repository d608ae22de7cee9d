# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Patches a tree of Apex, and takes the patch out, by ``git apply``: ``python -m apex_npu patch``.

A tree is not trusted. git would run programs that the settings in its ``.git`` name, so ``git apply`` gets an empty git
folder of its own instead. It writes nothing through symbolic links, and changes no file if a hunk does not fit. If git
fails while it writes, the files get their old contents again.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from apex_npu._cli.command_line import Commands, add_command

from . import PipelineError, eras

# The user's variables for the network. Others are dropped, since GIT_DIR and the like may mean another repository.
_KEPT = {"GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_PROXY_COMMAND", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"}
_OPTIONS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
# Files are treated as bytes, whatever filter or conversion the tree's .gitattributes name.
_ATTRIBUTES = "* -text !eol !filter !ident !working-tree-encoding !whitespace\n"


def git(folder: Path, *arguments: str | Path, **variables: str) -> str:
    """Return the output of ``git arguments`` in ``folder``, with more environment variables.

    Raises:
        PipelineError: git fails or is missing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **variables}
    command = ["git", "-C", folder, *_OPTIONS, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise PipelineError("there is no program git: install git") from None
    if done.returncode:
        raise PipelineError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return os.fsdecode(done.stdout)


def patch(folder: Path, shown: Path | None = None, *, reverse: bool = False) -> str:
    """Patch the tree in ``folder``, or take the patch out, and return a line about the result.

    Files that the patch does not name, and the other lines of those that it names, may have been edited, and stay.

    Args:
        folder: A checkout of Apex, or its unpacked archive.
        shown: The folder that messages name; by default ``folder``.
        reverse: Take the patch out.

    Raises:
        PipelineError: ``folder`` has no tree of a known era, or one that the era's patch does not fit, or it cannot be
            written. It is unchanged.
        OSError: It cannot be written, and some files could not be written back, either.
    """
    shown = (shown or folder).resolve()
    if not folder.is_dir():
        raise PipelineError(f"{shown} is not a folder: name a clone of {eras.UPSTREAM}")
    era = next((era for era in eras.ERAS if era.matches(folder)), None)
    if era is None:
        expected = "; ".join(f"{era.name} has {', '.join(era.has)}" for era in eras.ERAS)
        raise PipelineError(f"{shown} is of no known era ({expected}): name a clone of {eras.UPSTREAM}")
    if (folder / "change_data_ptr.py").is_dir():  # git apply would notice this only when it writes
        raise PipelineError(f"{shown} has a folder change_data_ptr.py: move it away")
    said = f"{'unmodified' if reverse else 'patched'}: {shown} (era {era.name})"
    direction = ("--reverse",) if reverse else ()
    try:
        counts = _apply(folder, era, "--check", "--numstat", "-z", *direction)
    except PipelineError as misfit:
        try:
            _apply(folder, era, "--check", *(() if reverse else ("--reverse",)))
        except PipelineError:
            raise PipelineError(
                f"the patch of era {era.name} does not fit {shown}. Remove other changes of these files (git stash "
                f"--include-untracked), check out {era.commit[:12]}, or adapt the patch (patch/README.md says how). "
                f"{misfit}"
            ) from None
        return f"already {said}"
    before = {file: _contents(file) for file in (folder / line.split("\t")[2] for line in counts.split("\0")[:-1])}
    # Ctrl-C comes before or after git writes the files. git inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        _apply(folder, era, *direction)
    except PipelineError as failure:
        _restore(before)
        raise PipelineError(f"{shown} cannot be written, and is as it was: {failure}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return f"now {said}"


def _contents(file: Path) -> tuple[bytes, int] | None:
    """Return the bytes and the mode of a file, or None if there is no such file."""
    return (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) if file.is_file() else None


def _restore(before: dict[Path, tuple[bytes, int] | None]) -> None:
    changed = {file: contents for file, contents in before.items() if _contents(file) != contents}
    for file in changed:  # all of them first: on a full disk there must be room for the old contents
        file.unlink(missing_ok=True)
    for file, contents in changed.items():
        if contents is not None:
            file.write_bytes(contents[0])
            file.chmod(contents[1])


def _apply(folder: Path, era: eras.Era, *options: str) -> str:
    with tempfile.TemporaryDirectory(prefix="apex_npu-git.") as own:
        variables = {"GIT_DIR": own, "GIT_WORK_TREE": str(folder.resolve()), "HOME": own, "XDG_CONFIG_HOME": own}
        variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        git(folder, "init", "--quiet", "--template=", **variables)
        Path(own, "info").mkdir(exist_ok=True)
        Path(own, "info", "attributes").write_text(_ATTRIBUTES, encoding="ascii")
        return git(folder, "apply", "--verbose", *options, era.patch_file, **variables)


def printed(work: Callable[[argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    """Wrap ``work`` to print its result or refusal. Its exit status is 0, or 1 after a refusal."""

    def run(options: argparse.Namespace) -> int:
        try:
            result = work(options)
        except (PipelineError, OSError) as error:
            print(f"apex_npu: {error}", file=sys.stderr)
            return 1
        print(result)
        return 0

    return run


def add_parser(commands: Commands) -> None:
    """Add the command ``patch``."""
    help = "patch a tree of NVIDIA's Apex to use apex_npu, or remove the patch"
    parser = add_command(commands, "patch", printed(lambda o: patch(o.folder, reverse=o.reverse)), help)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkout of NVIDIA's Apex")
    parser.add_argument("--reverse", action="store_true", help="remove the patch, byte for byte")
