# polyturn: `make demo` shows the whole pipeline, `make test` runs the tests; both set up .venv first.
# Needed: Linux, python3.11 or newer, pip, git, make.
PYTHON ?= python3.11
VENV ?= .venv
# Where pip looks for a CPU build of torch, if its own configuration has none (README).
TORCH_INDEX ?=
# A file of recipes/ without its ending, and overrides: make demo RECIPE=tiny SET="train.steps=3 seed=1" (a value has
# no spaces: SET='env.params={"size":48}'); such a run starts from the last commit in a git worktree of its own and
# leaves params.yaml alone (`polyturn use` writes it).
RECIPE ?=
SET ?=
# Of the Prefect server that `make services` starts.
PORT ?= 4200
# Not empty: services-stop cancels the runs that are at work.
FORCE ?=
# Processes that `make test` runs tests in; 0: in pytest's own.
TEST_PROCESSES ?= 2
# Where tests put their files: in memory, if there is room, as a database waits for the disk at every write.
TEST_TMP ?= $(shell df -k --output=avail,target /dev/shm 2>/dev/null | awk '$$2 == "/dev/shm" && $$1 > 8000000 {print $$2}')
# Directory of Geometry3K for geo3k-smoke.
DATA ?=

BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
FLOW := $(BIN)/python -m flows.pipeline
FLOW_ARGS = $(if $(RECIPE)$(SET),--worktree) $(if $(RECIPE),--recipe $(RECIPE)) $(foreach pair,$(SET),--set '$(pair)')
# Whole files go to a process, so that what a file sets up is set up once.
PYTEST = PYTEST_DEBUG_TEMPROOT=$(TEST_TMP) $(BIN)/python -m pytest -q --numprocesses $(TEST_PROCESSES) --dist loadfile \
  --no-loadscope-reorder -o tmp_path_retention_count=1
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-e2e test-ray test-full check format deps geo3k-smoke gpu-payload services services-stop clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(READY): pyproject.toml docker/constraints-cpu.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  --constraint docker/constraints-cpu.txt --editable '.[dev]'
	@touch $@

setup: $(READY) ## make .venv (done by the other targets too)

demo: $(READY) ## the whole pipeline on this machine (RECIPE=tiny: about a minute; SET="key=value ...")
	@$(FLOW) $(FLOW_ARGS)

test: $(READY) ## unit, contract and end-to-end tests
	@$(PYTEST) -o tmp_path_retention_policy=failed

test-e2e: $(READY) ## a team's services and runs for real: Postgres, S3, MLflow, Prefect, two workers (15 minutes)
	@$(PYTEST) tests/e2e_team

test-ray: $(READY) ## images.engine: ray, with Ray in an environment of its own (.polyturn/ray)
	@$(BIN)/python scripts/test_ray.py

test-full: $(READY) ## demo-size checks: three seeds, byte-identical reruns, ten kills, both learners (two and a half hours)
	@$(BIN)/python scripts/check_reproducible.py
	@$(BIN)/python scripts/check_resume.py --per-run 10
	@$(BIN)/python scripts/check_learners.py
	@$(BIN)/python -m pytest -q -m full

check: $(READY) ## lint, format, types, layers, images and services
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/cpu.Dockerfile docker/gpu.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows docs/ci/params.yaml

format: $(READY) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

deps: $(READY) ## rewrite the code deps of dvc.yaml from the imports
	@$(BIN)/python scripts/sync_dvc_deps.py

geo3k-smoke: $(READY) ## the same pipeline on real Geometry3K, a few steps, in a worktree of its own (DATA=directory)
	@test -n '$(DATA)' || { echo "geo3k-smoke needs DATA=DIRECTORY with problems.jsonl and images/"; exit 2; }
	@$(BIN)/python scripts/geo3k_smoke.py '$(DATA)'

gpu-payload: $(READY) ## archives for a GPU host without internet (OUT=directory; docs/gpu.md)
	@$(BIN)/python scripts/gpu_payload.py '$(or $(OUT),.polyturn/gpu-payload)'

services: $(READY) ## Prefect server and worker in the background, deployments registered
	@$(BIN)/python scripts/services.py start --port $(PORT)

services-stop: $(READY) ## end them (FORCE=1: also runs that are at work)
	@$(BIN)/python scripts/services.py stop $(if $(FORCE),--force)

clean: ## remove outputs, caches and runs of this checkout (not .venv)
	rm -rf artifacts runs .polyturn .dvc/cache .dvc/tmp
