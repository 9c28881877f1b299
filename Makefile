# `make quickstart`, `make test` and `make lint` install into .venv once; `make wheel` builds dist/*.whl, for every Python
# and torch from those of pyproject.toml on. `make faults` takes about an hour.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Each dependency as name==version, of the lines "name>=version" in pyproject.toml.
OLDEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)
# What `make matrix` asks pip for: with the oldest torch the oldest version of every dependency, otherwise pip's choice.
DEPENDENCIES = $(if $(filter torch==$* torch==$(*:.0=),$(OLDEST)),$(OLDEST),torch==$* torchvision)

.PHONY: quickstart test lint faults matrix audit wheel

quickstart: $(READY)
	$(BIN)/python -m zoo quickstart

test: $(READY)
	$(BIN)/python $(PYTEST)

# Not part of `make test`: what these report depends on their versions, and on the type stubs of torch.
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

faults: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not network" --fault-table -q \
	    tests/faults tests/weights/test_faults.py tests/weights/test_hostile_servers.py

# The tests with one version of torch, in an environment of its own: make matrix TORCH=2.13.0
matrix:
	@test -n "$(TORCH)" || { echo "name a version of torch: make matrix TORCH=2.13.0" >&2; exit 2; }
	$(MAKE) .matrix/$(TORCH)/installed
	.matrix/$(TORCH)/bin/python $(PYTEST)

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
$(READY): $(SOURCES)
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet "torch>=2.11" torchvision
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $(READY)

.matrix/%/installed: $(SOURCES)
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(@D)/bin/python -m pip install --quiet $(DEPENDENCIES)
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev]" $(DEPENDENCIES)
	touch $@
