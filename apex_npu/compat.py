# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``install_as_apex``: for this process, and those it spawns, the name ``apex`` answers with this package.

``MODULES`` says which module of ours answers to which old name, and ``OldModules`` imports them under it. A folder that
holds a package ``apex`` of one line (``names/``) goes onto ``sys.path`` as well, since spawned processes inherit that
and nothing else. An Apex that has been patched (``patch/``) asks ``beside_upstream.py`` for the same modules.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["install_as_apex", "uninstall_apex"]

MODULES = {
    "apex": "apex_npu",
    "apex.amp": "apex_npu.amp",
    "apex.amp._amp_state": "apex_npu.amp.legacy.state",
    "apex.amp.amp": "apex_npu.amp",
    "apex.amp.compat": "apex_npu.amp.legacy.utils",
    "apex.amp.frontend": "apex_npu.amp.frontend",
    "apex.amp.handle": "apex_npu.amp.legacy.handle",
    "apex.amp.lists": "apex_npu.amp.legacy.lists",
    "apex.amp.lists.functional_overrides": "apex_npu.amp.legacy.lists.functional_overrides",
    "apex.amp.lists.tensor_overrides": "apex_npu.amp.legacy.lists.tensor_overrides",
    "apex.amp.lists.torch_overrides": "apex_npu.amp.legacy.lists.torch_overrides",
    "apex.amp.opt": "apex_npu.amp.legacy.opt",
    "apex.amp.rnn_compat": "apex_npu.amp.legacy.rnn_compat",
    "apex.amp.scaler": "apex_npu.amp.legacy.scaler",
    "apex.amp.utils": "apex_npu.amp.legacy.utils",
    "apex.amp.wrap": "apex_npu.amp.legacy.wrap",
    "apex.contrib": "apex_npu.contrib",
    "apex.contrib.combine_tensors": "apex_npu.contrib.combine_tensors",
    "apex.contrib.combine_tensors.combine_tensors": "apex_npu.contrib.combine_tensors",
    "apex.fp16_utils": "apex_npu.fp16_utils",
    "apex.fp16_utils.fp16_optimizer": "apex_npu.fp16_utils.fp16_optimizer",
    "apex.fp16_utils.fp16util": "apex_npu.fp16_utils.fp16util",
    "apex.fp16_utils.loss_scaler": "apex_npu.fp16_utils.loss_scaler",
    "apex.multi_tensor_apply": "apex_npu.multi_tensor_apply",
    "apex.multi_tensor_apply.multi_tensor_apply": "apex_npu.multi_tensor_apply",
    "apex.normalization": "apex_npu.normalization",
    "apex.normalization.fused_layer_norm": "apex_npu.normalization",
    "apex.optimizers": "apex_npu.optimizers",
    "apex.optimizers.fused_adagrad": "apex_npu.optimizers.adagrad",
    "apex.optimizers.fused_adam": "apex_npu.optimizers.nvidia",
    "apex.optimizers.fused_lamb": "apex_npu.optimizers.nvidia",
    "apex.optimizers.fused_novograd": "apex_npu.optimizers.novograd",
    "apex.optimizers.fused_sgd": "apex_npu.optimizers.nvidia",
    "apex.optimizers.lamb": "apex_npu.optimizers.lamb",
    "apex.optimizers.npu_fused_adadelta": "apex_npu.optimizers.adadelta",
    "apex.optimizers.npu_fused_adam": "apex_npu.optimizers.adam",
    "apex.optimizers.npu_fused_adamp": "apex_npu.optimizers.adamp",
    "apex.optimizers.npu_fused_adamw": "apex_npu.optimizers.adamw",
    "apex.optimizers.npu_fused_bert_adam": "apex_npu.optimizers.bert_adam",
    "apex.optimizers.npu_fused_lamb": "apex_npu.optimizers.lamb",
    "apex.optimizers.npu_fused_rmsprop": "apex_npu.optimizers.rmsprop",
    "apex.optimizers.npu_fused_rmsprop_tf": "apex_npu.optimizers.rmsprop_tf",
    "apex.optimizers.npu_fused_sgd": "apex_npu.optimizers.sgd",
    "apex.parallel": "apex_npu.parallel",
    "apex.parallel.LARC": "apex_npu.parallel.larc",
    "apex.parallel.distributed": "apex_npu.parallel.distributed",
    "apex.parallel.optimized_sync_batchnorm": "apex_npu.parallel.sync_batchnorm",
    "apex.parallel.sync_batchnorm": "apex_npu.parallel.sync_batchnorm",
    "change_data_ptr": "apex_npu.contrib.combine_tensors",
}
# Modules that are imported by name alone: as an attribute of its package this name is something else.
_NO_ATTRIBUTE = {"apex.amp._amp_state"}
_ROOTS = ("apex", "change_data_ptr")
_FOLDER = str(Path(__file__).with_name("names"))
MARK = "__apex_npu__"


class OldModules(MetaPathFinder, Loader):
    """Imports modules under old names: each shows the public names of one of ours, and has no other submodules.

    Args:
        modules: Of each old name, our module.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Say that the old names are ours, and no others."""
        if fullname not in self.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=any(self._children(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        """Fill ``module``, and import its submodules: old scripts use many of them as attributes."""
        old = module.__name__
        ours = importlib.import_module(self.modules[old])
        public = getattr(ours, "__all__", None)
        if public is None:
            public = [n for n, value in vars(ours).items() if n[0] != "_" and not isinstance(value, ModuleType)]
        vars(module).update({name: getattr(ours, name) for name in public})
        vars(module).update({"__doc__": ours.__doc__, "__file__": ours.__file__, MARK: True})
        if module.__spec__ is not None:
            module.__spec__.origin = ours.__file__
        for child in self._children(old):
            name = child.rpartition(".")[2]
            attribute = vars(module).get(name)
            importlib.import_module(child)
            if child in _NO_ATTRIBUTE:
                vars(module)[name] = attribute

    def _children(self, old: str) -> list[str]:
        return [other for other in self.modules if other.rpartition(".")[0] == old]


def install_as_apex(force: bool = False) -> None:
    """Let ``import apex``, and ``change_data_ptr``, bring this package, until ``uninstall_apex``.

    An Apex that has been patched to answer with this package is left in place: nothing is done then.

    Args:
        force: Also where another package of that name is installed; it comes back with ``uninstall_apex``.

    Raises:
        RuntimeError: There is another one; nothing has been changed.
    """
    if _undo() is not None:
        return
    if not force:
        for root in _ROOTS:
            _check_name_is_free(root)
        if _is_patched_apex():
            return
    undo = ExitStack()
    # Hidden as a whole: submodules of another Apex would not fit ours.
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ROOTS}
    undo.callback(sys.modules.update, {n: module for n, module in hidden.items() if not hasattr(module, MARK)})
    undo.callback(forget_modules, MODULES)
    with undo.pop_all() as attempt:
        forget_modules(hidden)
        finder = OldModules(MODULES)
        sys.meta_path.insert(0, finder)
        attempt.callback(sys.meta_path.remove, finder)
        for root in _ROOTS:
            importlib.import_module(root)
        sys.path.insert(0 if force else len(sys.path), _FOLDER)
        attempt.callback(_remove_folder)
        vars(sys.modules["apex"])["_undo"] = attempt.pop_all()


def uninstall_apex() -> None:
    """Take ``install_as_apex`` back. What has been imported from ``apex`` stays usable."""
    undo = _undo()
    if undo is not None:
        undo.close()


def _undo() -> ExitStack | None:
    # On the module rather than in this one: whoever replaced it in sys.modules has taken the name over.
    undo = getattr(sys.modules.get("apex"), "_undo", None)
    return undo if isinstance(undo, ExitStack) else None


def forget_modules(modules: Iterable[str]) -> None:
    """Let those of ``modules`` that have been imported be imported anew when they are asked for."""
    for name in modules:
        sys.modules.pop(name, None)


def _remove_folder() -> None:
    if _FOLDER in sys.path:
        sys.path.remove(_FOLDER)


def _origin(root: str) -> str | None:
    """The file of the module that ``import root`` would bring, or None where there is none."""
    loaded = sys.modules.get(root)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or "memory"
    spec = importlib.util.find_spec(root)
    # A folder without an __init__.py, a checkout of Apex for instance, is no package that scripts could mean.
    return None if spec is None else spec.origin


def _is_ours(root: str, origin: str) -> bool:
    loaded = sys.modules.get(root)
    if loaded is not None:
        return bool(getattr(loaded, MARK, False))
    path = Path(origin)
    return path.suffix == ".py" and f"{MARK} = True" in path.read_text(encoding="utf-8", errors="replace")


def _is_patched_apex() -> bool:
    """Whether what answers to ``apex``, which is nobody else's, does so without us: an Apex that has been patched."""
    origin = _origin("apex")
    return origin is not None and Path(_FOLDER) not in Path(origin).parents


def _check_name_is_free(root: str) -> None:
    """Raise if ``root`` is the name of somebody else's module, imported or not."""
    origin = _origin(root)
    if origin is not None and not _is_ours(root, origin):
        raise RuntimeError(_refusal(root, origin, imported=root in sys.modules))


def _refusal(root: str, origin: str, *, imported: bool) -> str:
    folder = Path(origin).parent
    has = [name for name in ("amp", "optimizers") if (folder / name).is_dir() or (folder / f"{name}.py").is_file()]
    if root != "apex":
        what = "another module of this name"
    elif has:
        what = f"NVIDIA's Apex or a relative of it, with apex.{' and apex.'.join(has)}"
    elif (folder / "lib" / "libapex.py").is_file():
        what = "PyPI's apex, a toolkit for logins in web applications made with Pyramid, unrelated to NVIDIA's Apex"
    else:
        what = "a stranger: an unrelated package of this name, which has neither apex.amp nor apex.optimizers"
    state = "has been imported already" if imported else "is installed"
    return (
        f"{root} {state} ({origin}), {what}. Uninstall it, or pass force=True (python -m apex_npu run --force) to hide "
        "it from this process; nothing has been changed"
    )
