# Everything a person or a machine does with the workspace. Each target sets up what it needs:
# on a fresh Debian or macOS, Python 3.11 or later and make are enough.

PYTHON  ?=
VENV    ?= .venv
WORKERS ?= 2
RUNS    ?= 2000
ARGS    ?=
BIN     := $(VENV)/bin

# One line a stage; a stage that succeeds says nothing more.
STAGE   := @sh scripts/stage.sh

.PHONY: help setup demo demo-swerex test test-cluster test-compose chaos bench lint format types contracts spelling simulate mutants golden soak lock ci clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: ## make .venv from requirements.lock (again only when something changed)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh

demo: setup ## the counterexample, on real processes
	@$(BIN)/fencepost demo $(ARGS)

demo-swerex: setup ## the same on real SWE-ReX servers (ARGS=--json)
	@$(BIN)/python -m scripts.swerex_demo $(ARGS)

test: lint types contracts spelling ## every check, then every test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-cluster: setup ## three nats-servers, streams at R3, nodes lost (ARGS=--long: again and again)
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

test-compose: setup ## docker-compose for real: up, load, scale, kill, restart, down (skips without an engine)
	@$(BIN)/python -m pytest tests/integration/test_compose.py -n 0 -rs $(ARGS)

chaos: setup ## real faults on real processes (ARGS="--seconds=300 --seed=7 --cluster")
	@$(BIN)/python -m scripts.chaos $(ARGS)

bench: setup ## steps per second beside a plain task queue (ARGS=--json for JSON)
	@$(BIN)/fencepost bench $(ARGS)

lint: setup ## ruff: rules and format
	$(STAGE) "ruff check" $(BIN)/ruff check .
	$(STAGE) "ruff format" $(BIN)/ruff format --check .

format: setup ## let ruff mend rules and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: setup ## mypy, strict
	$(STAGE) "mypy" $(BIN)/mypy

contracts: setup ## what may import what
	$(STAGE) "import contracts" $(BIN)/lint-imports --no-cache

spelling: setup ## codespell
	$(STAGE) "codespell" $(BIN)/codespell

simulate: setup ## RUNS=2000 fresh seeds of the simulator; the first one is printed
	@$(BIN)/fencepost sim --fresh --runs $(RUNS) --jobs $(WORKERS) $(ARGS)

mutants: setup ## break one line at a time: whatever watches over it must notice
	@$(BIN)/python scripts/kill_mutants.py $(ARGS)

golden: setup ## compare the traces of fixed seeds with the repository's (ARGS=--renew writes them)
	@$(BIN)/python scripts/golden.py $(ARGS)

soak: setup ## 10,000 steps, 64 sandboxes, 5 services, random reclaims (ARGS=--steps=20000)
	@$(BIN)/python scripts/soak.py $(ARGS)

lock: setup ## resolve again and write requirements.lock
	@$(BIN)/python scripts/lock.py $(ARGS)

ci: ## what the build machine runs
	@bash .ci/run

clean: ## remove the environment, caches and local data
	@rm -rf "$(VENV)" .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .fencepost dist build
	@find libs services tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
