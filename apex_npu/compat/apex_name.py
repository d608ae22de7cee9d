# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``install_as_apex``: make ``apex`` a name of this package, for this process and those it spawns.

The folder ``names/``, which holds a minimal package ``apex``, is added to ``sys.path`` as well, since spawned processes
inherit nothing else. It also holds the metadata of a distribution ``apex``, since transformers and others ask
``importlib.metadata`` for its version. A patched Apex (``patch/``) gets the same modules from ``apex_hook.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path

from apex_npu.compat.finder import MARK, OldModules, forget_modules
from apex_npu.compat.table import APEX

__all__ = ["install_as_apex", "uninstall_apex"]

_ROOTS = ("apex", "apex_C", "change_data_ptr")
_FOLDER = str(Path(__file__).with_name("names"))


def install_as_apex(force: bool = False) -> None:
    """Make ``import apex``, ``apex_C`` and ``change_data_ptr`` import this package, until ``uninstall_apex``.

    If an Apex that was patched to use this package is installed, nothing is done.

    Args:
        force: Hide another installed package of that name; ``uninstall_apex`` restores it.

    Raises:
        RuntimeError: Another package of that name is installed. Nothing has been changed.

    Example::

        >>> apex_npu.install_as_apex()
        >>> from apex import amp
    """
    if _undo() is not None:
        return
    if not force:
        taken = names_taken()
        if "apex" not in taken and _is_patched_apex():
            return
        if taken:
            raise RuntimeError(next(iter(taken.values())))
    undo = ExitStack()
    # All submodules of another Apex are hidden, since they do not work with this package's.
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ROOTS}
    undo.callback(sys.modules.update, {n: module for n, module in hidden.items() if not hasattr(module, MARK)})
    undo.callback(forget_modules, APEX)
    with undo.pop_all() as attempt:
        forget_modules(hidden)
        finder = OldModules(APEX)
        sys.meta_path.insert(0, finder)
        attempt.callback(sys.meta_path.remove, finder)
        for root in _ROOTS:
            importlib.import_module(root)
        sys.path.insert(0 if force else len(sys.path), _FOLDER)
        attempt.callback(_remove_folder)
        vars(sys.modules["apex"])["_undo"] = attempt.pop_all()


def uninstall_apex() -> None:
    """Undo ``install_as_apex``. Objects that were imported from ``apex`` stay usable.

    Example::

        >>> apex_npu.install_as_apex()
        >>> from apex import amp
        >>> apex_npu.uninstall_apex()
    """
    undo = _undo()
    if undo is not None:
        undo.close()


def names_taken() -> dict[str, str]:
    """Return which of ``apex``, ``apex_C`` and ``change_data_ptr`` another package owns, each with the error message.

    The dict is empty if ``install_as_apex`` would succeed without ``force``, or has been called.
    """
    return {root: reason for root in _ROOTS if (reason := _why_taken(root))}


def _undo() -> ExitStack | None:
    # Kept on the module ``apex``, not on this one: code that replaces it in sys.modules has taken the name over.
    undo = getattr(sys.modules.get("apex"), "_undo", None)
    return undo if isinstance(undo, ExitStack) else None


def _remove_folder() -> None:
    if _FOLDER in sys.path:
        sys.path.remove(_FOLDER)


def _origin(root: str) -> str | None:
    """Return the file of the module that ``import root`` would load, or None without such a module."""
    loaded = sys.modules.get(root)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "memory"
    spec = importlib.util.find_spec(root)
    # A folder without an __init__.py, such as a checkout of Apex, is no package that scripts could mean.
    return None if spec is None else spec.origin


def _is_patched_apex() -> bool:
    """Return whether the module ``apex``, which no other package owns, comes from a patched Apex."""
    origin = _origin("apex")
    return origin is not None and Path(_FOLDER) not in Path(origin).parents


def _why_taken(root: str) -> str | None:
    """Return the error message if ``root`` is the name of a module that is not ours, imported or not."""
    origin, loaded = _origin(root), sys.modules.get(root)
    if origin is None or getattr(loaded, MARK, False):
        return None
    path = Path(origin)
    if loaded is None and path.suffix == ".py" and f"{MARK} = True" in path.read_text("utf-8", "replace"):
        return None
    state = "is installed" if loaded is None else "has been imported already"
    return (
        f"{root} {state} ({origin}), another package of this name. Uninstall it, or pass force=True (python -m "
        "apex_npu run --force) to hide it from this process; nothing has been changed"
    )
