# `make run`, `make test` and the other targets set up what they need; later calls start at once.
VENV ?= .venv
BIN := $(VENV)/bin
NAME ?= quickstart-$(shell date +%Y%m%d-%H%M%S)
DEVICE ?= cpu
WORKERS ?= 2
SEED ?= 1
MINUTES ?= 10
STEPS ?= 5000
# Files whose tests can have one of the markers $(1), those with the longest tests first: to collect all takes half a
# minute, and a worker that gets a long file last is left alone with it. support/served.py's ENGINES mark vLLM's tests.
FILES = $(foreach folder,vllm chaos parallel stack integration contract unit,$(sort $(shell \
	grep -rlE --include='test_*.py' 'mark\.($(1))\b$(if $(filter vllm,$(1)),|\bENGINES\b)' tests/$(folder))))
BY_FILE := --dist loadfile --no-loadscope-reorder
RELEASE := $(if $(VLLM),-$(VLLM))
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
export HF_UPDATE_DOWNLOAD_COUNTS := 0

.PHONY: run images smollm2 services test search slow-test parallel-test fault-test stack-test long-test chaos chaos-test soak contract-ascend npu vllm vllm-test transferqueue-test test-torch210 \
	nightly site demonstrate check-pins hashes \
	lint clean

run: $(VENV)/installed  ## train the quickstart recipe (about 5 minutes on 2 cores)
	$(BIN)/metronome run --set run.name=$(NAME) $(ARGS)

data/smollm2: | $(VENV)/installed
	$(BIN)/python -m data.make_smollm2

smollm2: data/smollm2  ## train SmolLM2-135M-Instruct, a pretrained model, on word problems (about 10 minutes on 2 cores)
	$(BIN)/metronome run infra/recipes/smollm2.toml --set run.name=$(NAME:quickstart-%=smollm2-%) $(ARGS)

services: $(VENV)/installed-dev  ## Prefect server and MLflow server on loopback, until Ctrl-C
	$(BIN)/python -m tasks.cluster.services $(ARGS)

test: $(VENV)/installed-dev  ## the main test suite (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not parallel and not faults and not stack and not chaos and not vllm and not ascend and not transferqueue and not nightly"

parallel-test: $(VENV)/installed-dev  ## several trainer ranks: layouts against Hugging Face, whole runs (under 15 minutes)
	$(BIN)/python -m pytest -m "parallel and not slow and not nightly"

fault-test: $(VENV)/installed-dev  ## instances that die, hang, fail, join and leave during runs
	$(BIN)/python -m pytest -m "faults and not slow and not nightly"

demonstrate: $(VENV)/installed-dev  ## a dropped update, a kill in mid-step and a wrong version label, and what Metronome says; ARGS="-k update", kill or label
	$(BIN)/python -m pytest -q -s -m faults tests/integration/test_demonstrations.py $(ARGS)

stack-test: $(VENV)/installed-dev  ## deployments, crashes and cancels on a real Prefect server, MLflow server and S3 endpoint
	$(BIN)/python -m pytest -m "stack and not slow and not nightly"

chaos-test: $(VENV)/installed-dev  ## disturbed runs with fixed seeds (6 minutes)
	$(BIN)/python -m pytest -n $(WORKERS) -m chaos $(call FILES,chaos)

chaos: $(VENV)/installed-dev  ## one run per SEED (1,2,...), disturbed for MINUTES; prints schedule, recoveries and findings
	PYTHONPATH=tests $(BIN)/python -m chaos --seeds $(SEED) --minutes $(MINUTES) $(ARGS)

soak: $(VENV)/installed-dev  ## STEPS small steps on real servers: how much each process grows
	PYTHONPATH=tests $(BIN)/python -m chaos.soak --steps $(STEPS) $(ARGS)

search: $(VENV)/installed-dev  ## the property tests of the main suite on new random examples (make test repeats fixed ones)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile search \
		-m "hypothesis and not slow and not parallel and not faults and not stack and not chaos and not vllm and not ascend and not transferqueue and not nightly"

slow-test: $(VENV)/installed-dev  ## tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not vllm and not nightly"

long-test: $(VENV)/installed-dev  ## slow, parallel, fault and stack tests, WORKERS files at a time
	$(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) -m "(slow or parallel or faults or stack) and not vllm and not nightly" $(call FILES,slow|parallel|faults|stack)

npu: $(VENV)/python  ## both environments for Ascend NPUs: trainer and instances (docs/hardware.md)
	bash infra/trainer/install.sh $(BIN)/python
	touch $(VENV)/installed
	$(MAKE) vllm DEVICE=npu

contract-ascend: $(VENV)/installed-dev  ## MindSpeed's real adaptor, from METRONOME_MINDSPEED, on the CPU (under 6 minutes)
	$(BIN)/python -m pytest -m ascend $(call FILES,ascend)

vllm:  ## the environment of vLLM instances, .venv-vllm: DEVICE=cpu (default), cuda or npu; VLLM=0.23: .venv-vllm-0.23
	bash infra/vllm/install.sh $(DEVICE)$(RELEASE) "$(PYTHON)" .venv-vllm$(RELEASE)

vllm-test: $(VENV)/installed-dev vllm  ## real vLLM on the CPU: routes, weight sync, whole runs (under 15 minutes); VLLM=0.23: on that release
	$(if $(VLLM),METRONOME_VLLM_PYTHON=$(CURDIR)/.venv-vllm$(RELEASE)/bin/python )$(BIN)/python -m pytest -m "vllm and not slow and not nightly" $(call FILES,vllm)

transferqueue-test: .venv-transferqueue/ready  ## runs with TransferQueue, here and on a Ray cluster of three nodes, and runs that Ray places (45 minutes, and 4 to build .venv-transferqueue once)
	.venv-transferqueue/bin/python -m pytest -m transferqueue --ignore tests/integration/test_ray_cluster.py --ignore tests/integration/test_ray_placement.py
	.venv-transferqueue/bin/python -m pytest -m transferqueue tests/integration/test_ray_cluster.py tests/integration/test_ray_placement.py  # apart, because a process reads Ray's token settings only once

test-torch210: .venv-torch210/ready  ## the trainer's tests on torch 2.10.0, Ascend's version (downloads 4 GB once)
	.venv-torch210/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not parallel and not faults and not stack and not chaos and not vllm and not ascend and not transferqueue and not nightly" \
		$(addprefix tests/unit/,algorithm config model platform run tools trainer wire)
	.venv-torch210/bin/python -m pytest -m "(parallel or ascend) and not slow and not nightly"

nightly: search test-torch210 transferqueue-test site  ## what .ci/run leaves out (hours)
	$(BIN)/python -m pytest -m nightly
	$(MAKE) vllm-test VLLM=0.23
	$(BIN)/python -m pytest -m "vllm and slow"
	$(MAKE) chaos SEED=1,2,3,4,5,6,7,8 MINUTES=10
	$(MAKE) chaos SEED=9 MINUTES=60
	$(MAKE) soak

check-pins: $(VENV)/installed-dev  ## check every package list against the requirements in the package index
	PYTHONPATH=tests $(BIN)/python -m support.pins $(ARGS)

hashes: $(VENV)/installed-dev  ## write the hashes of constraints.txt's packages, from the package index, to infra/packages
	PYTHONPATH=tests $(BIN)/python -m support.hashes

images:  ## container images (IMAGES="cpu cuda ascend minio"): user, digest and files of each, where docker, podman or buildah is
	sh infra/containers/build.sh $(IMAGES)

site: .venv-site/ready  ## the documentation as a site in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --config-file infra/site/mkdocs.yaml

lint: $(VENV)/installed-dev  ## style, formatting, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## delete all environments
	rm -rf $(VENV) .venv-vllm .venv-vllm-* .venv-torch210 .venv-transferqueue .venv-site site

$(VENV)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed, and none of python3.12, python3.11, python3 and python is one of them; give one with make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/python pyproject.toml constraints.txt
	@echo "Installing Metronome into $(VENV) (more than 1 GB to download; two to four minutes the first time) ..."
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	touch $@

.venv-site/ready: infra/site/requirements.txt
	$(MAKE) VENV=.venv-site .venv-site/python
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check -r infra/site/requirements.txt
	touch $@

.venv-transferqueue/ready: pyproject.toml constraints.txt infra/trainer/transferqueue.txt
	@echo "Installing Metronome with TransferQueue into .venv-transferqueue (240 MB of Ray) ..."
	$(MAKE) VENV=.venv-transferqueue .venv-transferqueue/python
	{ grep -v '^antlr4-python3-runtime==' constraints.txt; cat infra/trainer/transferqueue.txt; } > .venv-transferqueue/constraints.txt
	.venv-transferqueue/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-transferqueue/constraints.txt -e '.[dev,transferqueue,ray]'
	touch $@

.venv-torch210/ready: pyproject.toml constraints.txt
	@echo "Installing Metronome with torch 2.10.0 into .venv-torch210 (4 GB to download, 9 GB on disk) ..."
	$(MAKE) VENV=.venv-torch210 .venv-torch210/python
	sed 's/^torch==.*/torch==2.10.0/' constraints.txt > .venv-torch210/constraints.txt
	.venv-torch210/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-torch210/constraints.txt -e '.[dev]'
	touch $@
