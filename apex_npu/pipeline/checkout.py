# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A git checkout: what its commit holds, and what has been changed since."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .errors import PipelineError


def git(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> bytes:
    """What ``git arguments`` prints.

    Raises:
        PipelineError: It fails, or there is no git.
    """
    # A hook or an alias that runs us has set GIT_DIR and the like, for another repository than the one meant here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    environment.update({"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(env or {})})
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise PipelineError("git is not there, and trees of Apex are read with it: install git") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip() or f"status {done.returncode}"
        raise PipelineError(f"git {arguments[0]} failed: {said}")
    return done.stdout


_KEPT = {"GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_PROXY_COMMAND", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"}


class Checkout:
    """The checkout in ``folder``.

    Raises:
        PipelineError: ``folder`` is none, or a part of one.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PipelineError(f"{folder} is no folder: name a checkout of NVIDIA's Apex")
        self.folder = folder.resolve()
        try:
            top = Path(os.fsdecode(self.git("rev-parse", "--show-toplevel")).rstrip("\n"))
        except PipelineError as error:
            if "not a git repository" not in str(error) and "work tree" not in str(error):
                raise
            raise PipelineError(
                f"{folder} is not a git tree (an unpacked archive, perhaps), so it cannot be told what has been "
                "changed in it: clone it instead"
            ) from None
        if top.resolve() != self.folder:
            raise PipelineError(f"{folder} is not a git tree of its own but a folder of {top}: clone Apex instead")
        self.git_folder = Path(os.fsdecode(self.git("rev-parse", "--absolute-git-dir")).rstrip("\n"))
        try:
            self.head = self.git("rev-parse", "--verify", "HEAD^{commit}").decode().strip()
        except PipelineError:
            raise PipelineError(f"{folder} has no commit yet: it is not a clone of NVIDIA's Apex") from None

    def git(self, *arguments: str, env: dict[str, str] | None = None) -> bytes:
        """What git prints here."""
        return git(*arguments, cwd=self.folder, env=env)

    def resolve(self, ref: str) -> str | None:
        """The commit that ``ref`` names, if any."""
        for name in (ref, f"origin/{ref}"):
            try:
                return (
                    self.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
                    .decode()
                    .strip()
                )
            except PipelineError:
                continue
        return None

    def committed(self, path: str) -> bytes | None:
        """What HEAD has at ``path``, None where it has nothing."""
        return self.git("cat-file", "blob", f"HEAD:{path}") if self.has_committed(path) else None

    def has_committed(self, path: str) -> bool:
        """Whether HEAD has ``path``."""
        return bool(self.git("ls-tree", "HEAD", "--", path))

    def present(self, path: str) -> bytes | None:
        """What lies at ``path``, None where nothing does."""
        file = self.folder / path
        if file.is_symlink():
            raise PipelineError(f"{file} is a link; Apex has a file there")
        return file.read_bytes() if file.is_file() else None

    def modified(self) -> set[str]:
        """The files of HEAD or of the index that differ from it."""
        listed = self.git("diff", "HEAD", "--name-only", "-z", "--no-renames", "--ignore-submodules=all")
        return {os.fsdecode(name) for name in listed.split(b"\0") if name}

    def describe(self) -> str:
        """The commit for people: hash, day and first line."""
        return self.git("log", "-1", "--date=short", "--format=%h of %ad (%s)").decode("utf-8", "replace").strip()
