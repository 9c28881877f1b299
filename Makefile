# `make quickstart` and `make test` set up .venv once; `make wheel` builds dist/*.whl, for every Python and torch from
# those of pyproject.toml on. `make faults` takes about an hour.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed
LOWEST := .lowest/installed
# Each dependency as name==version, of the lines "name>=version" in pyproject.toml.
OLDEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)

.PHONY: quickstart test faults lowest audit wheel

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

# The tests with the oldest versions that pyproject.toml allows, in an environment of their own.
lowest: $(LOWEST)
	.lowest/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Known vulnerabilities of what is installed. It asks the package index, which no test does, so it is no part of them.
audit: $(READY)
	test -x .audit/bin/pip-audit || $(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet --upgrade pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > .audit/installed.txt
	.audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .audit/installed.txt

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

$(LOWEST): pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
	test -d .lowest || $(PYTHON) -m venv .lowest
	.lowest/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	.lowest/bin/python -m pip install --quiet $(OLDEST)
	.lowest/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev]" $(OLDEST)
	touch $(LOWEST)
