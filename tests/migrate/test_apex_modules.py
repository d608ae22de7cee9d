# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each module of Apex, however a script names it, is the one that the script gets under ``install_as_apex``."""

import json
import subprocess
import sys

from apex_npu import compat
from apex_npu.migrate import rewrite

# Executes programs and prints what they call `it`: the file of a module, or any other object as text.
RUN = """
import json, sys
if sys.argv[1:]:
    import apex_npu
    apex_npu.install_as_apex()
found = {}
for name, program in json.load(sys.stdin).items():
    names = {}
    try:
        exec(program, names)
        found[name] = getattr(names["it"], "__file__", repr(names["it"]))
    except (ImportError, AttributeError) as error:
        found[name] = repr(error)
print(json.dumps(found))
"""
MODULES = [old for old in compat.MODULES if "." in old]
FORMS = {
    "from": "from {package} import {name} as it\n",
    "own name": "from {package} import {name}\nit = {name}\n",
    "import as": "import {package}.{name} as it\n",
    "attribute": "import {package} as package\nit = package.{name}\n",
    "attribute of apex": "import apex\nit = {package}.{name}\n",
    "star": "from {package} import *\nit = {name}\n",
}


def run(programs, *arguments):
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_modules_are_those_of_install_as_apex():
    old = {}
    for module in MODULES:
        package, _, name = module.rpartition(".")
        old |= {f"{form} {module}": text.format(package=package, name=name) for form, text in FORMS.items()}
    rewritten = {name: rewrite(program) for name, program in old.items()}
    refused = {name for name, one in rewritten.items() if any(found.status == "refused" for found in one.findings)}
    assert all(rewritten[name].source == old[name] for name in refused)
    # Imports of public modules are rewritten, and so are modules that are attributes of their packages here, too.
    imports = {name for name in old if name.startswith(("from", "own name", "import as"))}
    assert imports & refused == {name for name in imports if "._" in name}
    assert {"attribute apex.parallel.distributed", "attribute of apex apex.amp"}.isdisjoint(refused)
    assert {"attribute apex.parallel.LARC", "star apex.normalization.fused_layer_norm"} <= refused
    new = run({name: one.source for name, one in rewritten.items() if name not in refused})
    wanted = run({name: old[name] for name in new}, "old")
    assert new == wanted
