#!/usr/bin/env bash
# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# The environment of a target of the Makefile, which sets the variables: scripts/setup.sh [what pip installs beside torch].
#
# A note (stamp) in the environment's folder holds what a step was done *for*; a step is done again when that changed.
# While a step runs there is a file `running`: an environment that still has it was interrupted, and is rebuilt, since
# pip cannot detect half a package.
set -euo pipefail
set -f  # TORCH_SPEC is split into words, never expanded to file names

stop() { echo "apex_npu: $*" >&2; exit 1; }
say() { echo "==> $*"; }
done_for() { [ -f "$notes/$1" ] && [ "$(cat "$notes/$1")" = "$2" ]; }
begin() { mkdir -p "$notes"; : > "$notes/running"; }
finish() { printf '%s\n' "$2" > "$notes/$1"; rm -f "$notes/running"; }
pip() { "$py" -m pip install -qq "$@"; }
torch_version() { "$py" -c 'from importlib.metadata import version; print(version("torch"))' 2> /dev/null || true; }

check_python() {
    "$PYTHON" -c '' > /dev/null 2>&1 || stop "'$PYTHON' does not run: install Python 3.10 or newer, or name one with PYTHON=..."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "$("$PYTHON" --version 2>&1) is too old: Python 3.10 or newer is needed; name one with PYTHON=python3.12"
}

make_venv() {
    notes="$VENV/.apex_npu"
    py="$VENV/bin/python"
    local identity
    identity="$("$PYTHON" -c 'import sys; print(sys.version_info[:3], sys.base_prefix)') in $PWD"
    if done_for venv "$identity" && [ ! -e "$notes/running" ] && [ -x "$py" ]; then return; fi
    "$PYTHON" -c 'import ensurepip, venv' 2> /dev/null ||
        stop "$PYTHON cannot make a virtual environment: install its venv module (Debian and Ubuntu: apt install python3-venv) or use VENV=system"
    if [ -e "$VENV" ]; then
        [ -d "$notes" ] || [ -z "$(ls -A "$VENV")" ] ||
            stop "'$VENV' was not made by this Makefile: remove it, choose another folder with VENV=..., or use VENV=system in an activated environment"
        if [ -e "$notes/running" ]; then say "$VENV was left half-made: starting it over"
        else say "$VENV was made for another Python or folder: starting it over"; fi
        rm -rf "$VENV"
    fi
    say "making $VENV with $("$PYTHON" --version)"
    begin
    "$PYTHON" -m venv "$VENV" || stop "'$PYTHON -m venv $VENV' failed, see above; VENV=system goes without"
    finish venv "$identity"
}

use_system() {
    notes="build/.apex_npu-system"
    py="$PYTHON"
    "$py" -m pip --version > /dev/null 2>&1 || stop "$PYTHON has no pip: install it (Debian and Ubuntu: apt install python3-pip)"
    if "$py" -c 'import os, sys, sysconfig; sys.exit(sys.prefix != sys.base_prefix or bool(os.environ.get("PIP_BREAK_SYSTEM_PACKAGES")) or not os.path.exists(sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED"))'; then
        stop "$PYTHON belongs to the operating system, which wants nothing installed into it: leave VENV=system out, or set PIP_BREAK_SYSTEM_PACKAGES=1"
    fi
}

install_torch() {
    local there
    there="$(torch_version)"
    if [ -n "$there" ] && [ -z "$TORCH_SPEC" ] && [ "$VENV" = system ]; then :
    elif [ -z "$there" ] || ! done_for torch "${TORCH_SPEC:-$TORCH_DEFAULT}"; then
        say "installing ${TORCH_SPEC:-$TORCH_DEFAULT} (a large package: from 20 seconds to several minutes)"
        begin
        pip ${TORCH_SPEC:-$TORCH_DEFAULT} || stop "pip could not install '${TORCH_SPEC:-$TORCH_DEFAULT}', see above; choose another with TORCH_SPEC=..."
        finish torch "${TORCH_SPEC:-$TORCH_DEFAULT}"
        there="$(torch_version)"
    fi
    case "$there" in
        "") stop "no torch after installing '$TORCH_SPEC': TORCH_SPEC has to name a torch, like torch==2.13.0" ;;
        0.* | 1.* | 2.[0-5] | 2.[0-5].*) stop "torch $there is too old: 2.6 or newer is needed; choose one with TORCH_SPEC=torch==2.13.0" ;;
    esac
    torch="$there"
}

install_packages() {
    local wanted
    wanted="torch $torch: $* $(cksum < requirements-dev.txt)"
    # The development set holds the demo's.
    if done_for packages "$wanted" || done_for packages "torch $torch: -r requirements-dev.txt $(cksum < requirements-dev.txt)"; then return; fi
    say "installing the packages that are needed beside torch (about half a minute)"
    begin
    pip -c requirements-dev.txt "$@" || stop "pip could not install what requirements-dev.txt lists, see above"
    finish packages "$wanted"
}

# Its interpreter runs the kernels for cuda on the CPU, and its compiler needs no GPU. Only beside the torch that it
# belongs to: another one could take it for its own.
install_triton() {
    local wanted="$TRITON_DEFAULT beside torch $torch"
    [ "${SIMULATOR:-}" = 1 ] || return 0
    case "$torch" in "${TORCH_DEFAULT#torch==}" | "${TORCH_DEFAULT#torch==}+"*) ;; *) return 0 ;; esac
    if done_for triton "$wanted" || "$py" -c 'import triton' 2> /dev/null; then return; fi
    say "installing $TRITON_DEFAULT (200 MB), for the tests of the kernels for cuda"
    begin
    if ! pip --no-deps "$TRITON_DEFAULT"; then say "there is no Triton for this machine: its tests are skipped"; fi
    finish triton "$wanted"
}

source_sum() { find csrc setup.py pyproject.toml -type f -print0 | LC_ALL=C sort -z | xargs -0 cksum | cksum; }

build() {
    local reason wanted built
    export PATH="$("$py" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"  # for pip's ninja
    reason="$("$py" -c 'import setup; print(setup.skip_reason() or "")')"
    if [ -n "$reason" ]; then say "no C++ extension, nothing will be fused: $reason"; fi
    wanted="torch $torch in $PWD: $(source_sum) ${CXX:-} ${DEBUG:-} $reason"
    built="$(find apex_npu -maxdepth 1 -name '_C.*.so')"
    if done_for build "$wanted"; then
        if [ -n "$reason" ] || { [ -n "$built" ] && [ "$(cat apex_npu/_C.torch_version 2> /dev/null)" = "$("$py" -c 'import torch; print(torch.__version__)')" ]; }; then return; fi
    fi
    if [ -z "$reason" ]; then say "building the C++ extension (about 1 minute)"; fi
    begin
    find apex_npu -maxdepth 1 \( -name '_C.*.so' -o -name _C.torch_version \) -delete
    "$py" -m pip uninstall -qq -y apex_npu > /dev/null 2>&1 || true
    # An extension that does not compile leaves a good environment, which need not be made again.
    pip --no-build-isolation --no-deps -e . || { rm -f "$notes/running"; stop "apex_npu could not be built, see above"; }
    finish build "$wanted"
}

# torch_npu without what it asks for, which would replace this torch.
install_torch_npu() {
    local said wanted="$TORCH_NPU_SPEC beside torch $torch in $PWD"
    if done_for torch_npu "$wanted"; then return; fi
    say "installing $TORCH_NPU_SPEC, the vendor's (50 MB)"
    begin
    rm -f "$notes/torch_npu"
    if ! said="$(pip --no-deps "$TORCH_NPU_SPEC" 2>&1)"; then
        rm -f "$notes/running"
        case "$said" in
            *Retrying* | *"No space"*) stop "pip could not install '$TORCH_NPU_SPEC': $said" ;;
            *"No matching distribution"*) ;;
            *) stop "pip could not install '$TORCH_NPU_SPEC': $said" ;;
        esac
        say "there is no $TORCH_NPU_SPEC for this machine and $("$py" --version): its tests are skipped"
        return 0
    fi
    printf '%s\n' "$PWD" "$PWD/tests/host_cann" > "$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/apex_npu.pth"
    finish torch_npu "$wanted"
}

# The sections of a file of requirements, each a training framework with all that it needs: what it asks for itself
# could replace this torch. One that cannot be installed or imported is left out.
install_hosts() {
    local name section wanted said site names="$HOSTS"
    site="$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$PWD" "$PWD/tests/integrations/environment" 'import torchvision_schemas' > "$site/apex_npu.pth"
    "$BORROW" -c 'import importlib.util as u; s = u.find_spec("npu_simulator"); print(s.submodule_search_locations[0] if s else "")' |
        while read -r said; do if [ -n "$said" ]; then ln -sfn "$said" "$site/npu_simulator"; fi; done
    case "$HOSTS" in all | newest) names="$(sed -n 's/^# host \([^:]*\):.*/\1/p' "$HOSTS_FROM")" ;; esac
    for name in $names; do
        section="$(sed -n "/^# host $name:/,/^$/p" "$HOSTS_FROM")"
        if [ -z "$section" ]; then stop "there is no '# host $name:' in $HOSTS_FROM"; fi
        if [ "$HOSTS" = newest ]; then section="$(printf '%s\n' "$section" | sed '/^#/!s/==[^,]*,*//')"; fi
        wanted="torch $torch: $section"
        if [ "$HOSTS" != newest ] && done_for "host-$name" "$wanted"; then continue; fi
        say "installing $name"
        begin
        printf '%s\n' "$section" > "$notes/section"
        if ! said="$(pip --no-deps --no-build-isolation --upgrade -r "$notes/section" 2>&1)" ||
           ! said="$("$py" -c "$(sed -n '1s/[^:]*: //p' "$notes/section")" 2>&1)"; then
            rm -f "$notes/running"
            say "tests of $name are skipped, since it cannot be installed: $(printf '%s' "$said" | tail -n 1)"
            continue
        fi
        finish "host-$name" "$wanted"
    done
}

build_simulator() {
    local wanted
    [ "${SIMULATOR:-}" = 1 ] || return 0
    if [ -n "$("$py" -c 'import setup; print(setup.skip_reason() or "")')" ]; then
        say "no C++ extensions, so no simulated NPU either: its tests are skipped"
        return 0
    fi
    wanted="torch $torch: $(find tests/npu_simulator \( -name build -o -name '*.egg-info' -o -name __pycache__ \) -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 cksum | cksum)"
    if done_for simulator "$wanted"; then return; fi
    say "building the simulated NPU for the tests (about 1 minute)"
    begin
    pip --no-build-isolation --no-deps ./tests/npu_simulator || { rm -f "$notes/running"; stop "tests/npu_simulator could not be built, see above"; }
    finish simulator "$wanted"
}

check_python
if [ "$VENV" = system ]; then use_system; else make_venv; fi
install_torch
install_packages "$@"
if [ "${TORCH_NPU:-}" = 1 ]; then install_torch_npu; exit; fi
if [ -n "${HOSTS_FROM:-}" ]; then install_hosts; exit; fi
install_triton
build
build_simulator
