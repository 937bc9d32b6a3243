# Two commands: `make repro` runs the pipeline, `make test` the checks. Both build .venv on first use.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
POOL ?= gpu
# dvc.yaml's commands say `python`: it must be the virtual environment's.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: help repro test ui exps worker bench prune clean
help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# torch goes first and alone, so that a CPU build offered on this machine is kept; elsewhere the same line
# takes the CUDA build. TORCH_ARGS passes options for another index or folder. Last an empty database of Prefect's, from
# which every checkout's begins (pipeline/server.py).
$(VENV)/.ok: pyproject.toml constraints.txt
	@echo "building $(VENV) (once, 2 to 4 minutes)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0 $(TORCH_ARGS)
	$(VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(VENV)/bin/python -m pipeline.server
	@touch $@

repro: $(VENV)/.ok  ## run what changed, then show the result (T="stage@key" for one target)
	@python -m pipeline.repro $(T)

test: $(VENV)/.ok  ## lint, types and tests
	ruff check . && ruff format --check .
	mypy
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest $(ARGS)

ui: $(VENV)/.ok  ## MLflow on this machine's port 5000
	mlflow server --backend-store-uri sqlite:///$(CURDIR)/mlflow.db --host 127.0.0.1 --port 5000 --workers 1

# DVC would also show the hash of every file, and the path of a figure before its name.
NO_COLUMN := ^(src|pipeline|evals|artifacts|results/(code|prepare|teacher|student|distill|evaluate))
exps: $(VENV)/.ok  ## DVC's table of experiments: the reports' figures, and the settings that differ
	@dvc exp show --only-changed --md --precision 3 --drop '$(NO_COLUMN)' $(ARGS) \
		| sed -E 's#results/report/##g; s#_metrics\.json##g; s# {2,}# #g; /^\|-/d' | { column -t -s '|' 2>/dev/null || cat; }

worker: $(VENV)/.ok  ## run what others submit to POOL (gpu), in this checkout (docs/orchestration.md)
	ALAMBIQUE_CHECKOUT=$(CURDIR) PREFECT_HOME=$${PREFECT_HOME:-$(CURDIR)/.prefect} prefect worker start --pool $(POOL)

bench: $(VENV)/.ok  ## one benchmark, e.g. CASE=loss_memory
	python -m benchmarks.run $(CASE)

# A shard with one name only is in no teacher's cache, neither in artifacts/ nor in DVC's (hard links).
# DAYS is an assumption: whoever resumes a run does so within a month.
WORK := $(or $(ALAMBIQUE_WORK),.work)
DAYS ?= 30
prune:  ## forget scratch work that nothing uses and that is older than DAYS (30)
	@mkdir -p "$(WORK)/teacher" "$(WORK)/distill"
	find "$(WORK)/teacher" -name '*.safetensors' -links 1 -mtime +$(DAYS) -print -delete
	find "$(WORK)/distill" -mindepth 1 -maxdepth 1 -mtime +$(DAYS) -print -exec rm -rf {} +

clean:  ## forget scratch work (checkpoints, captured shards); DVC's cache and results stay
	rm -rf .work .pytest_cache .mypy_cache .ruff_cache
