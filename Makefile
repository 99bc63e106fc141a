# make train    fullshard train
# make test     format and lint, then types and all tests
# make test-clients   the programs of examples/clients, with Accelerate, Trainer, TRL, Lightning and torchtitan, in
#               an environment of their own: .venv-clients
# make test-installed   what pip installs: the wheel with each extra alone, each in an environment of its own, which pip
#               fills from its index
# make check    format, lint and types only
# make dist     sdist and wheel in dist, built, checked, and installed into an empty environment. Needs no network
# make docs     the pages as a site in build/site; a link that leads nowhere is an error
# make clean    remove all environments and everything the tools left behind
#
# Each of them first builds .venv, if it is missing or older than pyproject.toml or constraints.txt: `make train` with what
# training and the report need, all others with the developers' tools, too. An environment of the first kind is added to.
#
#   ARGS=...            arguments for fullshard train or pytest:  make test ARGS="-k layout"
#   PYTHON=...          the interpreter .venv is built from
#   TORCH=...           another version of torch, in an environment of its own, such as .venv-torch-2.15.0. Tests and
#                       training run as usual; format, lint and types are checked with the usual torch only
#   TORCH_PIP_ARGS=...  options for installing torch. On a machine without a GPU, name an index of
#                       PyTorch's CPU wheels:  make test TORCH_PIP_ARGS="--index-url <address>"
#   PY=...              use this interpreter as it is, with src on its path: no .venv, no installing

PYTHON ?= python3
TORCH_PIP_ARGS ?=
ARGS ?=

VENV := $(if $(TORCH),.venv-torch-$(TORCH),.venv)

ifdef PY
RUN := PYTHONPATH=src $(PY)
TRAIN_READY :=
READY :=
CLIENTS_RUN := $(RUN)
CLIENTS_READY :=
TOGETHER :=
else
RUN := $(VENV)/bin/python
TRAIN_READY := $(VENV)/.train-ready
READY := $(VENV)/.ready
CLIENTS_RUN := .venv-clients/bin/python
CLIENTS_READY := .venv-clients/.ready
# Tests wait now and then, so three of them run side by side on two cores.
TOGETHER := -n 3 --dist worksteal
endif

# Tests start many interpreters, and each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

ifdef TORCH
CHECKED := $(READY)
TYPES := true
else
CHECKED := $(READY) lint
TYPES := $(RUN) -m mypy
endif

.PHONY: train test test-clients test-installed check lint dist docs clean

train: $(TRAIN_READY)
	$(RUN) -m fullshard train $(ARGS)

# Types are checked beside the tests, of which many wait.
test: $(CHECKED)
	@$(TYPES) > .mypy_output 2>&1 & types=$$!; \
	$(RUN) -m pytest $(TOGETHER) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat .mypy_output; rm -f .mypy_output; exit $$((tests ? tests : types))

test-clients: $(CLIENTS_READY)
	FULLSHARD_TEST_CLIENTS=1 $(CLIENTS_RUN) -m pytest $(or $(ARGS),tests/clients tests/docs/test_how_do_i.py)

test-installed: $(READY)
	FULLSHARD_TEST_INSTALLED=1 $(RUN) -m pytest $(TOGETHER) $(or $(ARGS),tests/installed)

check: $(READY) lint
	$(RUN) -m mypy

dist: $(READY)
	$(RUN) .ci/dist.py

docs: $(READY)
	$(RUN) docs/build_api.py
	$(RUN) -m sphinx --quiet --nitpicky --fail-on-warning -c docs -d build/doctrees . build/site
	@echo "Open build/site/index.html."

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and alone, because TORCH_PIP_ARGS are for it only. Each version asks for setuptools of its own.
$(VENV)/.train-ready: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/;/^setuptools==/d)' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install -c $(VENV)/constraints.txt $(TORCH_PIP_ARGS) torch
	$(RUN) -m pip install -c $(VENV)/constraints.txt -e '.[report]'
	@nvidia-smi >/dev/null 2>&1 || $(RUN) -c 'import torch; torch.version.cuda is None or print("There is no GPU here, but this torch is a CUDA build. It works; for the smaller CPU build: make clean, then TORCH_PIP_ARGS (see Makefile).")'
	touch $@

$(VENV)/.ready: $(VENV)/.train-ready
	$(RUN) -m pip install -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

# torchtitan asks for an old datasets, for wandb and more that its decoder does not import, so it comes without its
# dependencies. It imports triton also on a CPU; a CUDA build of torch has brought its own.
.venv-clients/.ready: pyproject.toml constraints.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -c constraints.txt $(TORCH_PIP_ARGS) torch
	.venv-clients/bin/python -m pip install -c constraints.txt -e '.[cli,clients]' hypothesis numpy pytest pytest-timeout safetensors
	.venv-clients/bin/python -m pip install -c constraints.txt --no-deps spmd_types torch_checkpointing torchtitan triton
	touch $@
