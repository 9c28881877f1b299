# `make quickstart` sets up .venv, `make test` with the development tools; `make wheel` builds dist/*.whl, for every Python and torch from
# those of pyproject.toml on. `make faults` takes about an hour.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed
TOOLS := .venv/installed-tools
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
LOWEST := .lowest/installed
# Each dependency as name==version, of the lines "name>=version" in pyproject.toml.
OLDEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)

.PHONY: quickstart test faults lowest audit wheel

quickstart: $(READY)
	$(BIN)/python -m zoo quickstart

test: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

faults: $(TOOLS)
	$(BIN)/python -m pytest -m "not gpu and not network" --fault-table -q \
	    tests/faults tests/weights/test_faults.py tests/weights/test_hostile_servers.py

# The tests with the oldest versions that pyproject.toml allows, in an environment of their own.
lowest: $(LOWEST)
	.lowest/bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Known vulnerabilities of what is installed. It asks the package index, which no test does, so it is no part of them.
audit: $(TOOLS)
	test -x .audit/bin/pip-audit || $(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet --upgrade pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > .audit/installed.txt
	.audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .audit/installed.txt

wheel: $(READY)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

$(READY): $(SOURCES)
	$(call install,.)
	@touch $(READY)

$(TOOLS): $(SOURCES)
	$(call install,.[dev])
	@touch $(READY) $(TOOLS)

# Without build isolation: the kernels are built against the torch that is installed, not against a second one.
define install
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "1/3 updating pip and setuptools in .venv"
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	@echo "2/3 installing PyTorch in .venv, if it is not there: about 3 GB to download, 6 GB of disk"
	@echo "    Without a GPU, stop here (Ctrl-C), install the smaller CPU build and run make again:"
	@echo "    $(BIN)/python -m pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu"
	@$(BIN)/python -m pip install "torch>=2.11" torchvision
	@echo "3/3 compiling the CPU kernels and installing zoo and its other dependencies: some minutes"
	@$(BIN)/python -m pip install --quiet --no-build-isolation --editable "$(1)"
endef

$(LOWEST): pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
	test -d .lowest || $(PYTHON) -m venv .lowest
	.lowest/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	.lowest/bin/python -m pip install --quiet $(OLDEST)
	.lowest/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev]" $(OLDEST)
	touch $(LOWEST)
