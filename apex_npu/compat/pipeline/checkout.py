# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A checkout of Apex, which is not trusted: its era, whether it is patched, and the change from one state to the other.

git may run programs that a tree's git folder names. That folder is therefore only asked for the names of commits and of
the object folder. Everything else uses a temporary git folder, which reads these objects and has its own settings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from . import PipelineError, eras

# The user's variables for the network. Others are dropped, since GIT_DIR and the like may mean another repository.
_KEPT = {"GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSL_CAINFO", "GIT_PROXY_COMMAND", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"}
_OPTIONS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_OFFLINE = {"GIT_ALLOW_PROTOCOL": "none"}
_NO_SETTINGS = _OFFLINE | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
# Files are treated as bytes, whatever filter, conversion or diff program .gitattributes names.
_ATTRIBUTES = "* -text !eol !filter !ident !working-tree-encoding !diff !whitespace\n"


def git(folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None, data: bytes = b"") -> bytes:
    """Return the output of ``git arguments`` in ``folder``; raise a PipelineError if it fails or git is missing."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **(env or {})}
    command = ["git", "-C", folder, *_OPTIONS, *arguments]
    try:
        done = subprocess.run(command, input=data, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        raise PipelineError("there is no program git: install git") from None
    if done.returncode:
        raise PipelineError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


class Checkout:
    """The git checkout whose top folder is ``folder``; messages name ``shown`` instead.

    Raises:
        PipelineError: There is no checkout, it has no commit, or ``folder`` is not its top folder.
    """

    def __init__(self, folder: Path, shown: Path | None = None) -> None:
        self.folder, self.shown = folder.resolve(), (shown or folder).resolve()
        if not folder.is_dir():
            raise PipelineError(f"{self.shown} is not a folder: name a git clone of NVIDIA's Apex")
        try:
            top, objects = self._ask("--show-toplevel"), self._ask("--git-path", "objects")
            self.head = self._ask("--verify", "HEAD^{commit}")
        except PipelineError as error:
            said = f"{self.shown} cannot be read as a git tree with a commit: name a git clone of NVIDIA's Apex"
            raise PipelineError(f"{said} ({error})") from None
        if Path(top).resolve() != self.folder:
            raise PipelineError(f"{self.shown} is a folder of the git tree {top}: name a git clone of NVIDIA's Apex")
        self._own = Path(tempfile.mkdtemp(prefix="apex_npu-git."))
        weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        for name in ("info", "objects/info", "refs"):
            (self._own / name).mkdir(parents=True)
        (self._own / "objects/info/alternates").write_bytes(os.fsencode(self.folder / objects) + b"\n")
        (self._own / "info/attributes").write_text(_ATTRIBUTES, encoding="ascii")
        (self._own / "config").write_text("[core]\n\tfileMode = false\n", encoding="ascii")
        (self._own / "HEAD").write_text(f"{self.head}\n", encoding="ascii")

    def _ask(self, *arguments: str) -> str:
        """Return the answer of the checkout's own git folder."""
        return os.fsdecode(git(self.folder, "rev-parse", *arguments, env=_OFFLINE)).removesuffix("\n")

    def resolve(self, ref: str) -> str | None:
        """Return the commit that ``ref`` names, if any."""
        for name in (ref, f"origin/{ref}"):
            try:
                return self._ask("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
            except PipelineError:
                continue
        return None

    def git(self, *arguments: str | Path, data: bytes = b"") -> bytes:
        """Return git's output on the checkout's objects and files, using only the temporary git folder's settings."""
        own = str(self._own)
        paths = {"GIT_DIR": own, "GIT_WORK_TREE": str(self.folder), "HOME": own, "XDG_CONFIG_HOME": own}
        return git(self.folder, *arguments, env=_NO_SETTINGS | paths, data=data)

    def _names(self, *arguments: str) -> list[str]:
        """Return the paths that ``git arguments`` lists."""
        return [os.fsdecode(name) for name in self.git(arguments[0], "-z", *arguments[1:]).split(b"\0") if name]

    def patch(self, *, reverse: bool = False) -> str:
        """Patch the checkout, or take the patch out, and return a line about the result.

        Raises:
            PipelineError: The checkout is neither unmodified nor patched, or cannot be written. It stays unchanged.
        """
        era, (upstream, patched), is_patched = self.inspect()
        said = f"{'unmodified' if reverse else 'patched'}: {self.shown}, Apex {self.head[:8]} (era {era.name})"
        if is_patched is not reverse:
            return f"already {said}"
        try:
            self._replace(*((patched, upstream) if reverse else (upstream, patched)))
        except OSError as error:
            raise PipelineError(f"{self.shown} cannot be written, and is as it was: {error}") from error
        return f"now {said}"

    def inspect(self) -> tuple[eras.Era, tuple[str, str], bool]:
        """Return the era, git's upstream and patched trees, and whether the files are those of the patched tree.

        Raises:
            PipelineError: The era is unknown, its patch does not fit the commit, or there are other changes.
        """
        at = f"{self.shown}, commit {self.head[:12]},"
        files = set(self._names("ls-tree", "-r", "--name-only", self.head))
        era = next((era for era in eras.ERAS if era.matches(files)), None)
        if era is None:
            expected = "; ".join(f"{era.name} has {', '.join(era.has)}" for era in eras.ERAS)
            said = f"{at} is of no known era of NVIDIA's Apex ({expected}): name a clone of {eras.UPSTREAM}"
            raise PipelineError(said)
        try:
            upstream, patched = self.head, self._applied(era.patch_file)
        except PipelineError as misfit:
            try:
                upstream, patched = self._applied(era.patch_file, "--reverse"), self.head
            except PipelineError:
                raise PipelineError(
                    f"the patch of era {era.name} does not fit {at} so nothing has been changed. Check out "
                    f"{era.commit[:12]}, or adapt the patch (patch/README.md says how). {misfit}"
                ) from None
        added = self._names("diff-tree", "-r", "--name-only", "--diff-filter=A", upstream, patched)
        from_upstream = self._differing(upstream) | {path for path in added if os.path.lexists(self.folder / path)}
        from_patched = self._differing(patched)
        if from_upstream and from_patched:
            edited = sorted(from_upstream & from_patched)
            what = f"has other changes in {', '.join(edited)}" if edited else "is half patched"
            raise PipelineError(
                f"{at} {what}; it must be unmodified or patched. Set the changes aside (git stash "
                "--include-untracked), or make a fresh clone"
            )
        return era, (upstream, patched), not from_patched

    def _applied(self, patch: Path, *options: str) -> str:
        """Return the tree that results from applying ``patch`` to the commit."""
        self.git("read-tree", self.head)
        self.git("apply", "--cached", "--verbose", *options, patch)
        return self.git("write-tree").decode().strip()

    def _differing(self, tree: str) -> set[str]:
        """Return the files of ``tree`` that are different or missing in the folder."""
        self.git("read-tree", tree)
        return set(self._names("diff", "--name-only", "--no-renames", "--ignore-submodules=all"))

    def _replace(self, before: str, after: str) -> None:
        """Give the files that differ between two trees the contents of the second; change all of them or none.

        Both contents are written beside the files first, so that only renames remain to be done or undone. A full disk
        therefore changes no file. A rename replaces a link and never follows it.
        """
        paths = self._names("diff-tree", "-r", "--name-only", before, after)
        with tempfile.TemporaryDirectory(prefix=".apex_npu-", dir=self.folder) as aside:
            for tree in (before, after):
                for path in self._names("ls-tree", "-r", "--name-only", tree, *paths):
                    file = Path(aside, tree, path)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(self.git("cat-file", "blob", f"{tree}:{path}"))
                    if os.path.lexists(self.folder / path):
                        shutil.copymode(self.folder / path, file)

            def place(tree: str) -> None:
                for path in paths:
                    if Path(aside, tree, path).exists():
                        Path(aside, tree, path).replace(self.folder / path)
                    else:
                        (self.folder / path).unlink(missing_ok=True)

            try:
                place(after)
            except BaseException:
                place(before)
                raise
