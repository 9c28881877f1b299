# Two commands: `make quickstart` and `make test`. Both set up .venv once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed

.PHONY: quickstart test

quickstart: $(READY)
	$(BIN)/python -m zoo quickstart

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# Without build isolation, so that an extension would be built against the torch that is installed.
$(READY): pyproject.toml setup.py
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet "torch>=2.11" torchvision
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $(READY)
