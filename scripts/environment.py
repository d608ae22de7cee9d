# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Makes an environment for a target of the Makefile: python scripts/environment.py FOLDER GROUP [EXTRA].

FOLDER is a virtual environment, or "system". GROUP is one of [dependency-groups] in pyproject.toml. EXTRA is
"simulator", "torch_npu", or a file with the requirements of training frameworks. Notes in FOLDER say what each step was
done for: a second run does what has changed since. An environment that was interrupted is made again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (PYTHON may name an older one)
    sys.exit(f"{sys.executable} is too old: Python 3.10 or newer is needed; name one with PYTHON=python3.12")
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib  # Python 3.10

FOLDER, GROUP, EXTRA = (*sys.argv[1:], "")[:3]
NOTES = Path("build" if FOLDER == "system" else FOLDER, ".apex_npu", "notes.json")
PYTHON = sys.executable if FOLDER == "system" else os.path.abspath(f"{FOLDER}/bin/python")
ABOUT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
done = json.loads(NOTES.read_text()) if NOTES.is_file() else {}


def step(name, wanted, said, *command, optional=False):
    """Run ``command``, unless it was run for ``wanted`` before; what is ``optional`` may fail."""
    if done.get(name) == wanted:
        return
    print(f"==> {said}", flush=True)
    NOTES.parent.mkdir(parents=True, exist_ok=True)
    done.pop(name, None)
    NOTES.write_text(json.dumps({**done, "running": name}))
    failed = subprocess.run(command).returncode
    if not failed:  # else it is tried again the next time
        done[name] = wanted
    NOTES.write_text(json.dumps(done))
    if failed:
        failure = f"apex_npu: {said} failed"
        print(f"{failure}: its tests are skipped") if optional else sys.exit(f"{failure}, see above")


def pip(name, wanted, said, *arguments, optional=False):
    """A step of pip."""
    step(name, wanted, said, PYTHON, "-m", "pip", "install", "-qq", *arguments, optional=optional)


def ask(code, python=PYTHON):
    """What Python prints; "" where it fails."""
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def group(name):
    """All requirements of a group."""
    parts = [
        group(part["include-group"]) if isinstance(part, dict) else [part] for part in ABOUT["dependency-groups"][name]
    ]
    return [requirement for part in parts for requirement in part]


def digest(*roots):
    """A sum of all source files."""
    files = [file for root in roots for file in (Path(root), *sorted(Path(root).rglob("*"))) if file.is_file()]
    kept = [file.read_bytes() for file in files if not re.search(r"/build/|/__pycache__/|\.egg-info/", str(file))]
    return hashlib.sha256(b"\0".join(kept)).hexdigest()


def build():
    """Build the package in place; whether there are compiled extensions."""
    reason = ask("import setup; print(setup.skip_reason() or '')")
    said = f"no C++ extension, nothing is fused: {reason}" if reason else "building the C++ extension (about 1 minute)"
    built, note = list(Path("apex_npu").glob("_C.*.so")), Path("apex_npu/_C.torch_version")
    variables = [os.environ.get("CXX"), os.environ.get("DEBUG")]
    wanted = [torch, digest("csrc", "setup.py"), ABOUT["project"], variables, os.getcwd(), reason]
    stale = not reason and not (built and note.is_file() and note.read_text().strip() == torch)
    if done.get("build") != wanted or stale:
        done.pop("build", None)
        for file in (*built, note):
            file.unlink(missing_ok=True)
    pip("build", wanted, said, "--no-build-isolation", "--no-deps", "-e", ".")
    return not reason


def build_simulator():
    """What the tests for cuda and npu need on a CPU."""
    # Triton interprets its kernels, beside the torch that it belongs to: another could take it for its own.
    if f"torch=={torch.partition('+')[0]}" in group("torch"):
        pip("triton", group("triton"), "installing Triton (200 MB)", "--no-deps", *group("triton"), optional=True)
    wanted, where = [torch, digest("tests/npu_simulator")], "./tests/npu_simulator"
    pip("simulator", wanted, "building the simulated NPU (about 1 minute)", "--no-build-isolation", "--no-deps", where)


def find(site, *lines):
    """Let Python find this checkout, with the extension of .venv, and more."""
    (site / "apex_npu.pth").write_text("".join(f"{line}\n" for line in (os.getcwd(), *lines)))


def install_hosts(file):
    """Sections of ``file`` that HOSTS names, without what they ask for themselves, which could replace this torch."""
    find(site, os.path.abspath("tests/integrations/environment"), "import torchvision_schemas")
    (site / "npu_simulator").unlink(missing_ok=True)
    if simulator := ask("import npu_simulator; print(npu_simulator.__path__[0])", os.environ["BORROW"]):
        (site / "npu_simulator").symlink_to(simulator)
    sections = dict(re.findall(r"# host (\w+)\n((?:.+\n)+)", Path(file).read_text(encoding="utf-8")))
    hosts = os.environ["HOSTS"]
    for name in sections if hosts in ("all", "newest") else hosts.split():
        if name not in sections:
            sys.exit(f"apex_npu: HOSTS={name!r} is not in {file}: choose from {', '.join(sections)}, all, newest")
        lines = re.sub(r"==[^,\n]*,*", "", sections[name]) if hosts == "newest" else sections[name]
        if hosts == "newest":
            done.pop(name, None)
        options = ("--no-deps", "--no-build-isolation", "--upgrade", *lines.splitlines())
        pip(name, [torch, lines], f"installing {name}", *options, optional=True)


here = [sys.version, sys.base_prefix, os.getcwd()]
broken = done.pop("running", "build") not in ("build", "simulator")  # pip cannot detect half a package
if FOLDER != "system" and (done.get("venv") != here or broken or not os.path.exists(PYTHON)):
    if os.path.exists(FOLDER):
        if not NOTES.parent.exists():
            sys.exit(f"apex_npu: '{FOLDER}' was not made by this Makefile: remove it, or choose another VENV=...")
        print(f"==> {FOLDER} is half-made, or of another Python or folder: starting it over", flush=True)
        shutil.rmtree(FOLDER)
    done = {}
    step("venv", here, f"making {FOLDER} with {sys.executable}", sys.executable, "-m", "venv", FOLDER)
scripts, site = (Path(ask(f"import sysconfig; print(sysconfig.get_path('{kind}'))")) for kind in ("scripts", "purelib"))
os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"  # pip's ninja is there

version = "from importlib.metadata import version; print(version('torch'))"
spec = os.environ.get("TORCH_SPEC") or group("torch")[0]
if FOLDER != "system" or os.environ.get("TORCH_SPEC") or not ask(version):
    pip("torch", spec, f"installing {spec} (up to several minutes)", *spec.split())
torch = ask(version)
if tuple(map(int, re.findall(r"\d+", torch)[:2])) < (2, 6):
    sys.exit(
        f"apex_npu: torch {torch or 'is missing'}: 2.6 or newer is needed; choose one with TORCH_SPEC=torch==2.13.0"
    )
packages = group(GROUP)
if not set(packages) <= set(done.get("packages", [])):
    pip("packages", packages, f"installing the packages of {GROUP}", *packages)
if EXTRA.endswith(".txt"):
    install_hosts(EXTRA)
elif EXTRA == "torch_npu":
    spec = os.environ.get("TORCH_NPU_SPEC") or group("torch_npu")[0]
    find(site, os.path.abspath("tests/host_cann"))
    pip("torch_npu", [spec, torch], f"installing {spec}, the vendor's", "--no-deps", spec, optional=True)
elif build() and EXTRA == "simulator":
    build_simulator()
