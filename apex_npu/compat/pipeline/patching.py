# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of a checkout of Apex, and the changes between them. In any other state it is rejected, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from . import eras
from .checkout import Checkout
from .errors import PipelineError
from .files import Change, replace_all


class State(Enum):
    """What a tree may be, and nothing else."""

    ORIGINAL = "as upstream has it"
    PATCHED = "patched"


@dataclass(frozen=True)
class Tree:
    """A checkout that is in order.

    Attributes:
        era: Whose patch fits.
        state: Where it is.
        changes: From upstream's files to the patched ones.
    """

    checkout: Checkout
    era: eras.Era
    state: State
    changes: tuple[Change, ...]


def set_state(checkout: Checkout, wanted: State) -> str:
    """Patch the checkout, or take the patch out.

    Returns:
        A line that says what has been done.

    Raises:
        PipelineError: The checkout is in neither state; it stays as it is.
    """
    tree = inspect(checkout)
    what = f"{checkout.folder}, Apex {checkout.head[:8]} (era {tree.era.name})"
    if tree.state is wanted:
        return f"already {wanted.value}: {what}"
    replace_all(tree.changes if wanted is State.PATCHED else [change.reversed() for change in tree.changes])
    return f"now {wanted.value}: {what}"


def inspect(checkout: Checkout) -> Tree:
    """Find era and state.

    Raises:
        PipelineError: It is no tree of a known era, or not in order.
    """
    _refuse_others_patch(checkout)
    era = _era(checkout)
    changes = _changes(checkout, era)
    return Tree(checkout, era, _state(checkout, changes), changes)


def _era(checkout: Checkout) -> eras.Era:
    known = eras.load()
    era = known.recognise(checkout.has_committed)
    if era is None:
        raise PipelineError(_unknown(checkout, known))
    return era


def _refuse_others_patch(checkout: Checkout) -> None:
    setup = checkout.present("setup.py") or b""
    signs = [path for path in _ASCENDS_FILES if checkout.present(path) is not None]
    if b"ascend" in setup and b"apex_npu" not in setup:
        signs.append("setup.py, which says ascend")
    if signs:
        raise PipelineError(
            f"{checkout.folder} has been patched by Ascend's apex patch (it has {', '.join(signs)}). Both cannot be in "
            "one tree: start from a fresh clone of NVIDIA's Apex"
        )


# What its scripts copy over the tree.
_ASCENDS_FILES = ("apex/optimizers/npu_fused_adam.py", "apex/contrib/combine_tensors/combine_tensors.py")


def _unknown(checkout: Checkout, known: eras.Eras) -> str:
    if not checkout.has_committed("apex/multi_tensor_apply/multi_tensor_apply.py"):
        return (
            f"{checkout.folder} is not NVIDIA's Apex: expected apex/multi_tensor_apply/multi_tensor_apply.py in its "
            f"commit, {checkout.describe()}. Clone {known.url}"
        )
    expected = "; ".join(f"{era.name} has {', '.join(era.has)}" for era in known.eras)
    return f"the commit of {checkout.folder}, {checkout.describe()}, is of no known era: expected one of {expected}"


def _changes(checkout: Checkout, era: eras.Era) -> tuple[Change, ...]:
    """What the patch does to the files of the commit, which may hold it already."""
    patch = era.patch_file()
    misfit = checkout.misfit(patch)
    if not misfit:
        return checkout.between("HEAD", checkout.applied(patch))
    if not checkout.misfit(patch, "--reverse"):
        return checkout.between(checkout.applied(patch, "--reverse"), "HEAD")
    pin = "" if checkout.head == era.commit else f", made for {era.commit[:8]},"
    raise PipelineError(
        f"the patch of era {era.name}{pin} does not fit the commit of {checkout.folder}, {checkout.describe()}:\n"
        f"{misfit}\nNothing has been changed. Check out {era.commit[:8]}, or adapt the patch (patch/README.md says how)"
    )


def _state(checkout: Checkout, changes: Sequence[Change]) -> State:
    present = {change.path: checkout.present(change.path) for change in changes}
    original = [change.path for change in changes if present[change.path] == change.before]
    patched = [change.path for change in changes if present[change.path] == change.after]
    edited = (set(present) - {*original, *patched}) | (checkout.modified() - set(present))
    if edited:
        raise PipelineError(
            f"{checkout.folder} is dirty: expected the files of its commit, {checkout.describe()}, with the patch or "
            f"without, and found other changes in {', '.join(sorted(edited))}. Commit them elsewhere or drop them (git "
            "diff shows them)"
        )
    if len(original) == len(changes):
        return State.ORIGINAL
    if len(patched) == len(changes):
        return State.PATCHED
    raise PipelineError(
        f"{checkout.folder} is half patched: {', '.join(patched)} as patched, {', '.join(original)} as upstream. Bring "
        f"the files back (git checkout -- {' '.join(change.path for change in changes if change.before is not None)}) "
        f"and delete {', '.join(change.path for change in changes if change.before is None)}"
    )
