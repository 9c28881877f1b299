# `make quickstart` installs into .venv, `make test` and `make lint` with the development tools; `make wheel` builds
# dist/*.whl, for every Python and torch from those of pyproject.toml on. `make faults` takes about an hour.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed
TOOLS := .venv/installed-tools
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Each dependency as name==version, of the lines "name>=version" in pyproject.toml.
OLDEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)
# What `make matrix` asks pip for: with the oldest torch the oldest version of every dependency, otherwise pip's choice.
DEPENDENCIES = $(if $(filter torch==$* torch==$(*:.0=),$(OLDEST)),$(OLDEST),torch==$* torchvision)

.PHONY: quickstart test lint faults matrix audit wheel

quickstart: $(READY)
	$(BIN)/python -m zoo quickstart

test: $(TOOLS)
	$(BIN)/python $(PYTEST)

# Not part of `make test`: what these report depends on their versions, and on the type stubs of torch.
lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

faults: $(TOOLS)
	$(BIN)/python -m pytest -m "not gpu and not network" --fault-table -q \
	    tests/faults tests/weights/test_fetch.py tests/weights/test_read.py

# The tests with one version of torch, in an environment of its own: make matrix TORCH=2.13.0
matrix:
	@test -n "$(TORCH)" || { echo "name a version of torch: make matrix TORCH=2.13.0" >&2; exit 2; }
	$(MAKE) .matrix/$(TORCH)/installed
	.matrix/$(TORCH)/bin/python $(PYTEST)

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

.matrix/%/installed: $(SOURCES)
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(@D)/bin/python -m pip install --quiet $(DEPENDENCIES)
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev]" $(DEPENDENCIES)
	touch $@
