# The first Python that is new enough and can make virtual environments; `make PYTHON=/path/to/python` overrides it.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13 python3.14 python3,\
	$(shell $(python) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(python))))
BIN := .venv/bin

.PHONY: setup demo test test-all lint

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer with venv and pip was found; install one" \
	    "(Debian: apt install python3 python3-venv) or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[hf,dev]'
	touch $@

demo: setup
	$(BIN)/python -m experiments.demo

test: setup
	$(BIN)/python -m pytest -m "not full"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
