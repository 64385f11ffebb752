# The two commands: `make run` and `make test`. Each sets up what it needs; a second call starts at once.
VENV ?= .venv
BIN := $(VENV)/bin
NAME ?= quickstart-$(shell date +%Y%m%d-%H%M%S)
DEVICE ?= cpu
WORKERS ?= 2
RELEASE := $(if $(VLLM),-$(VLLM))
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export HF_UPDATE_DOWNLOAD_COUNTS := 0

.PHONY: run services test slow-test parallel-test fault-test stack-test vllm vllm-test lint clean

run: $(VENV)/installed  ## the main job on the quickstart recipe (about 5 minutes on 2 cores)
	$(BIN)/metronome run --set run.name=$(NAME) $(ARGS)

services: $(VENV)/installed-dev  ## Prefect server, MLflow server and an S3 endpoint on loopback, until Ctrl-C
	$(BIN)/python -m tasks.cluster.services $(ARGS)

test: $(VENV)/installed-dev  ## the main test suite (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not parallel and not faults and not stack and not vllm"

parallel-test: $(VENV)/installed-dev  ## several trainer ranks at once: layouts against Hugging Face, whole runs (under 15 minutes)
	$(BIN)/python -m pytest -m "parallel and not slow"

fault-test: $(VENV)/installed-dev  ## instances that die, hang, err, come and go in running jobs
	$(BIN)/python -m pytest -m "faults and not slow"

stack-test: $(VENV)/installed-dev  ## deployments, crashes and cancels on a real Prefect server, MLflow server and S3 endpoint
	$(BIN)/python -m pytest -m "stack and not slow"

slow-test: $(VENV)/installed-dev  ## the tests that take minutes each
	$(BIN)/python -m pytest -m slow

long-test: $(VENV)/installed-dev  ## slow, parallel, fault and stack tests, WORKERS files at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "(slow or parallel or faults or stack) and not vllm"

vllm:  ## the environment of vLLM instances, .venv-vllm: DEVICE=cpu (default), cuda or npu; VLLM=0.23: .venv-vllm-0.23
	bash infra/vllm/install.sh $(DEVICE)$(RELEASE) "$(PYTHON)" .venv-vllm$(RELEASE)

vllm-test: $(VENV)/installed-dev vllm  ## real vLLM on the CPU: routes, weight sync, whole runs (under 15 minutes); VLLM=0.23: on that release
	$(if $(VLLM),METRONOME_VLLM_PYTHON=$(CURDIR)/.venv-vllm$(RELEASE)/bin/python )$(BIN)/python -m pytest -m vllm

lint: $(VENV)/installed-dev  ## style, form, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-vllm .venv-vllm-*

$(VENV)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed, and none of python3.12, python3.11, python3, python is one; give one with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing Metronome into $(VENV) (two to four minutes the first time) ..."
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	touch $@
