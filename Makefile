# One command each, from a fresh clone with Python 3.11 or newer: `make serve`, `make test`, `make test-deploy`,
# `make check`, `make sim SEEDS=n`, `make peers`, `make bench`.
# Packages come from whatever index pip is configured for.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := .setup/done
HAS_COMPILER := { command -v g++ || command -v clang++ || command -v c++; } >/dev/null
define BUILD_KERNELS
from kernels.native.library import load_library
print("native kernels:", load_library().isa)
endef
export BUILD_KERNELS
SERVE_ARGS ?=
TEST_ARGS  ?= --suite all
KILLS      ?= 20
FAULTS     ?= 50
MINUTES    ?= 60
N          ?= 50
CASES      ?= 2000
SEED       ?= 0
SEEDS      ?= 2000
PEERS      ?=
BENCH_ARGS ?=

.PHONY: setup serve test test-deploy manifests check chaos chaos-net soak cancels sigterm fuzz sim peers bench publish bench-demo clean

setup: $(STAMP)

# torch first and by itself: its CPU or CUDA build is the index's choice, and nothing after it may change it.
$(STAMP): pyproject.toml
	@mkdir -p $(@D)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@$(HAS_COMPILER) || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
		&& apt-get install -y -qq --no-install-recommends g++; } || echo "no C++ compiler: CPU kernels will be slow"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@if $(HAS_COMPILER); then $(BIN)/python -c "$$BUILD_KERNELS"; fi
	@touch $@

serve: setup
	$(BIN)/novainfer serve $(SERVE_ARGS)

# The SDK of the Node tests is fetched where npm is there; without it those tests say why they do not run.
build/node/node_modules/openai: | $(STAMP)
	@if command -v npm >/dev/null; then \
		npm install --silent --no-audit --no-fund --prefix build/node openai@6 || echo "npm cannot fetch openai"; fi

# A browser for the tests of the chat page, likewise.
test: setup build/node/node_modules/openai
	@{ command -v chromium && command -v chromedriver; } >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } \
		|| echo "no chromium or no chromedriver: some tests will say that they do not run"
	@$(BIN)/python -m tests.run $(TEST_ARGS)

# The deployment files with the real tools: Helm's engine, Kubernetes schemas, Prometheus, and `ray up` on two hosts made
# of network namespaces (as root).
test-deploy: setup
	@{ command -v promtool && command -v sshd && command -v rsync && command -v ip; } >/dev/null || { test "$$(id -u)" = 0 \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus openssh-server openssh-client \
		rsync iproute2; } || echo "no Prometheus or no sshd: some tests will say that they do not run"
	$(BIN)/python -m pip install --quiet --editable '.[deploy]'
	@$(BIN)/python -m tests.run --suite deploy

# Dashboards, and plain manifests for those without Helm.
manifests: setup
	$(BIN)/python -m pip install --quiet --editable '.[deploy]'
	$(BIN)/python deploy/dashboards.py
	$(BIN)/python deploy/kubernetes/render.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/arch

# Long forms of tests that `make test` runs in short.
chaos: setup
	$(BIN)/python -m tests.chaos.kill_loop --kills $(KILLS)

chaos-net: setup
	$(BIN)/python -m tests.chaos.net_loop --faults $(FAULTS) --seed $(SEED)

soak: setup
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --seed $(SEED)

cancels: N = 20000
cancels: setup
	$(BIN)/python -m tests.chaos.cancels --requests $(N) --seed $(SEED)

sigterm: setup
	$(BIN)/python -m tests.chaos.sigterm --rounds $(N) --seed $(SEED)

# Simulated servers under faults, on all cores: SEEDS worlds from SEED on, each in both modes (docs/simulation.md).
sim: setup
	$(BIN)/novainfer sim $(SEED) --seeds $(SEEDS)

# Other LLM servers, each in a folder of its own outside of ours: PEERS="vllm openvino" for some, else all.
peers: setup
	$(BIN)/python -m bench.peers install $(PEERS)

# Us and the peers that are installed in turns, at least three rounds (bench/README.md).
bench: setup
	@mkdir -p build
	$(BIN)/python -m bench.compare --output build/comparison.json $(BENCH_ARGS)

# The comparison's figures in docs/performance.md.
publish: setup
	$(BIN)/python -m pip install --quiet --editable '.[plots]'
	$(BIN)/python -m bench.publish build/comparison.json docs/performance.md

bench-demo: setup
	$(BIN)/python -m bench.startup
	$(BIN)/python -m bench.offline
	$(BIN)/python -m bench.serving --start-server

# All of what `make test` has a sample of: hostile parameters, frames, and requests made from the OpenAPI description.
fuzz: setup
	$(BIN)/python -m tests.safety.frames
	$(BIN)/python -m tests.safety.parameters
	$(BIN)/python -m tests.safety.parameters --optimised
	$(BIN)/python -m tests.safety.fuzz --cases $(CASES)

clean:
	rm -rf $(VENV) .setup build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
