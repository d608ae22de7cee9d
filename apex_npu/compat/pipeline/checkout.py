# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A git checkout: what its commit holds, and what has been changed since."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from pathlib import Path

from . import files
from .errors import PipelineError
from .files import Change

# Neither hooks nor a file system monitor run, nothing is fetched to complete a partial clone, and no index is written.
_OPTIONS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_VARIABLES = {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
# For a repository that is only asked for names: nothing is fetched, and no object stands for another.
_NOTHING_ELSE = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_REPLACE_OBJECTS": "1"}
_KEPT = {"GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_PROXY_COMMAND", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"}


def git(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> bytes:
    """What ``git arguments`` prints.

    Raises:
        PipelineError: It fails, or there is no git.
    """
    # A hook or an alias that runs us has set GIT_DIR and the like, for another repository than the one meant here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    environment.update({**_VARIABLES, **(env or {})})
    try:
        command = ["git", *_OPTIONS, *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise PipelineError("git is not there, and trees of Apex are read with it: install git") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip() or f"status {done.returncode}"
        raise PipelineError(f"git {arguments[0]} failed: {said}")
    return done.stdout


class Checkout:
    """The checkout in ``folder``, whose ``.git`` is not trusted: git may run what a configuration in there names.

    Only names of commits are read there. All else is done with a temporary git folder, which has the objects of the
    checkout, and neither its configuration nor its hooks, attributes, index or replaced objects.

    Attributes:
        folder: Its absolute path.
        head: The commit.

    Raises:
        PipelineError: ``folder`` is none, or a part of one.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PipelineError(f"{folder} is no folder: name a checkout of NVIDIA's Apex")
        self.folder = folder.resolve()
        try:
            top = self._ask("--show-toplevel")
        except PipelineError as error:
            if "not a git repository" not in str(error) and "work tree" not in str(error):
                raise
            raise PipelineError(
                f"{folder} is not a git tree (an unpacked archive, perhaps), so it cannot be told what has been "
                "changed in it: clone it instead"
            ) from None
        if Path(top).resolve() != self.folder:
            raise PipelineError(f"{folder} is not a git tree of its own but a folder of {top}: clone Apex instead")
        try:
            self.head = self._ask("--verify", "HEAD^{commit}")
        except PipelineError:
            raise PipelineError(f"{folder} has no commit yet: it is not a clone of NVIDIA's Apex") from None
        self._own = _git_folder_of(self.folder / self._ask("--git-path", "objects"), self.head)
        weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)

    def _ask(self, *arguments: str) -> str:
        """What ``git rev-parse`` says of the checkout's own git folder."""
        said = git("rev-parse", *arguments, cwd=self.folder, env=_NOTHING_ELSE)
        return os.fsdecode(said).removesuffix("\n")

    def git(self, *arguments: str) -> bytes:
        """What git prints of the checkout's commit and files, with an index of its own."""
        return git(*arguments, cwd=self.folder, env={"GIT_DIR": str(self._own), "GIT_WORK_TREE": str(self.folder)})

    def resolve(self, ref: str) -> str | None:
        """The commit that ``ref`` names, if any."""
        for name in (ref, f"origin/{ref}"):
            try:
                return self._ask("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
            except PipelineError:
                continue
        return None

    def has_committed(self, path: str) -> bool:
        """Whether HEAD has ``path``."""
        return self._content("HEAD", path) is not None

    def _content(self, tree: str, path: str) -> bytes | None:
        entry = self.git("ls-tree", tree, "--", path).split()
        return self.git("cat-file", "blob", entry[2].decode()) if entry[1:2] == [b"blob"] else None

    def misfit(self, patch: Path, *options: str) -> str:
        """Why ``git apply`` refuses the file ``patch``, with the lines that it has searched for; "" where it fits.

        Args:
            patch: For the files of the commit; those of the checkout do not matter.
            options: Further ones of ``git apply``: ``--reverse``.
        """
        self.git("read-tree", "HEAD")
        try:
            self.git("apply", "--cached", "--check", "--verbose", *options, str(patch))
        except PipelineError as error:
            said = str(error).removeprefix("git apply failed: ").splitlines()
            return "\n".join(
                f"  {line}".rstrip() for line in said if not line.startswith(("Checking patch ", "Hunk #"))
            )
        return ""

    def applied(self, patch: Path, *options: str) -> str:
        """The tree that a patch which fits makes of the commit."""
        self.git("read-tree", "HEAD")
        self.git("apply", "--cached", *options, str(patch))
        return self.git("write-tree").decode().strip()

    def between(self, before: str, after: str) -> tuple[Change, ...]:
        """The files in which two trees differ."""
        listed = self.git("diff-tree", "-r", "-z", "--name-only", "--no-renames", before, after)
        paths = [os.fsdecode(path) for path in listed.split(b"\0") if path]
        return tuple(Change(self.folder, p, self._content(before, p), self._content(after, p)) for p in paths)

    def present(self, path: str) -> bytes | None:
        """The contents of the file at ``path``, None where there is no file."""
        return files.read(self.folder, path)

    def modified(self) -> set[str]:
        """The files of HEAD that differ from it."""
        self.git("read-tree", "HEAD")
        listed = self.git("diff", "HEAD", "--name-only", "-z", "--no-renames", "--ignore-submodules=all")
        return {os.fsdecode(name) for name in listed.split(b"\0") if name}

    def describe(self) -> str:
        """The commit for people: hash, day and first line."""
        said = self.git("log", "--no-walk", "--date=short", "--format=%h of %ad (%s)")
        return said.decode("utf-8", "replace").strip()


def _git_folder_of(objects: Path, head: str) -> Path:
    """A temporary git folder at the commit ``head``, which reads ``objects`` and writes its own."""
    folder = Path(tempfile.mkdtemp(prefix="apex_npu-git."))
    (folder / "refs").mkdir()
    (folder / "objects" / "info").mkdir(parents=True)
    (folder / "objects" / "info" / "alternates").write_bytes(os.fsencode(objects) + b"\n")
    (folder / "HEAD").write_text(f"{head}\n", encoding="ascii")
    # A file is compared by its contents: not every file system has modes. Patches fit to the byte, whatever is set
    # for all repositories.
    settings = "[core]\n\tbare = false\n\tfileMode = false\n[apply]\n\twhitespace = nowarn\n\tignoreWhitespace = no\n"
    (folder / "config").write_text(settings, encoding="ascii")
    return folder
