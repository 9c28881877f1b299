# `make quickstart` and `make test` set up .venv once; `make wheel` builds dist/*.whl, for every Python and torch from
# those of pyproject.toml on. `make faults` takes a quarter of an hour.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed

.PHONY: quickstart test faults wheel

quickstart: $(READY)
	$(BIN)/python -m zoo quickstart

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

faults: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not network" --fault-table -q \
	    tests/faults tests/weights/test_faults.py tests/weights/test_hostile_servers.py

wheel: $(READY)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# Without build isolation: the kernels are built against the torch that is installed, not against a second one.
$(READY): pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet "torch>=2.11" torchvision
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $(READY)
