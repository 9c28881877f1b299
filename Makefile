# `make quickstart` installs zoo in .venv, trains a small network and scores it. The other targets install the development
# tools, too. `make test` is for every edit; `make check` runs lint and all tests but those that repeat shorter ones with
# more cases, and those that need a GPU or a network; `make faults` takes an hour.
# `make libraries` installs the packages of docs/integrations.md, whose tests are skipped without them.
# `make wheel` builds two wheels in dist/, for every Python and torch from those of pyproject.toml on: one for every machine,
# and one with the CPU kernels for machines like this; and the wheel of zoo-inplace-abn, which imports zoo as inplace_abn.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/installed
TOOLS := .venv/installed-tools
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*.h)
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
ON_DEMAND := exhaustive or gpu or network
# Each dependency as name==version, of the lines "name>=version" in pyproject.toml.
OLDEST = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml)
NAMES = $(foreach dependency,$(OLDEST),$(firstword $(subst ==, ,$(dependency))))
SPACE := $() $()
WHEEL := $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist
# What `make matrix` asks pip for: with the oldest torch the oldest version of every dependency, otherwise pip's choice.
DEPENDENCIES = $(if $(filter torch==$* torch==$(*:.0=),$(OLDEST)),$(OLDEST),torch==$* torchvision)

# Other packages that lean training is tested with.
LIBRARIES = timm peft transformers accelerate trl bitsandbytes diffusers ultralytics monai segmentation-models-pytorch lightning torchcodec

.PHONY: quickstart test test-slow test-pages test-gpu test-all lint check docs faults libraries matrix audit wheel

quickstart:
	@echo "On two cores this takes about three minutes, besides the download: two to install zoo, and one to train and score."
	@$(MAKE) --no-print-directory $(READY)
	$(BIN)/python -m zoo quickstart
	@echo "activate      . .venv/bin/activate, for the commands above"

# Tests that take over 2 s belong to test-slow.
test: $(TOOLS)
	$(BIN)/python $(PYTEST) --durations 5 --durations-min 2

test-slow: $(TOOLS)
	$(BIN)/python $(PYTEST) -m "(slow or dist) and not (smoke or pages or $(ON_DEMAND))"

test-pages: $(TOOLS)
	$(BIN)/python $(PYTEST) -m "pages and not ($(ON_DEMAND))"

test-gpu: $(TOOLS)
	$(BIN)/python -m pytest -m gpu

# `test`, `test-slow` and `test-pages` in one run, which collects the tests once.
test-all: $(TOOLS)
	$(BIN)/python $(PYTEST) -m "not ($(ON_DEMAND))"

lint: $(TOOLS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@for folder in zoo tests; do echo "$$folder/: $$(find $$folder -name '*.py' -exec cat {} + | wc -l) lines"; done

check: lint test-all

# The documentation site, in build/site. A broken link or an undocumented name is an error.
docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "written to build/site/index.html"

faults: $(TOOLS)
	$(BIN)/python -m pytest -m "not gpu and not network" -q \
	    tests/faults tests/weights/test_fetch.py tests/weights/test_read.py

libraries: $(TOOLS)
	@for library in $(LIBRARIES); do \
	    $(BIN)/python -m pip install --quiet --no-compile $$library || echo "not installed, its tests are skipped: $$library"; \
	done

# The tests with one version of torch, in an environment of its own: make matrix TORCH=2.13.0
matrix:
	@test -n "$(TORCH)" || { echo "name a version of torch: make matrix TORCH=2.13.0" >&2; exit 2; }
	$(MAKE) .matrix/$(TORCH)/installed
	.matrix/$(TORCH)/bin/python $(PYTEST) -m "not ($(ON_DEMAND))"

# Known vulnerabilities of what is installed. It asks the package index, which no test does, so it is no part of them.
audit: $(TOOLS)
	test -x .audit/bin/pip-audit || $(PYTHON) -m venv .audit
	.audit/bin/python -m pip install --quiet --upgrade pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > .audit/installed.txt
	.audit/bin/pip-audit --strict --no-deps --disable-pip --requirement .audit/installed.txt

wheel: $(READY)
	rm -rf build dist/*.whl
	ZOO_PURE_WHEEL=1 $(WHEEL) .
	rm -rf build
	$(WHEEL) .
	$(WHEEL) scripts/inplace_abn
	rm -rf scripts/inplace_abn/build scripts/inplace_abn/*.egg-info
	@$(BIN)/python -m zipfile --list dist/*-abi3-*.whl | grep _native.abi3.so >/dev/null || \
	    { echo "the CPU kernels could not be compiled" >&2; rm dist/*-abi3-*.whl; exit 1; }
	@ls dist/*.whl

$(READY): $(SOURCES)
	$(call install,.,)
	@touch $(READY)

$(TOOLS): $(SOURCES)
	$(call install,.[dev], and the development tools)
	@touch $(READY) $(TOOLS)

# Without build isolation, so that the kernels are built against the torch that is installed, not against a second one.
# Without bytecode, which Python writes when it first imports a module: to compile all modules of torch takes two fifths of
# the processor time of its installation.
define install
	@test -d .venv || $(PYTHON) -m venv .venv
	@echo "1/3 installing pip and setuptools in .venv"
	@$(BIN)/python -m pip install --quiet --no-compile --upgrade pip "setuptools>=77"
	@echo "2/3 installing torch and torchvision in .venv, unless they are: about 3 GB to download, 6 GB of disk"
	@echo "    Without a GPU, stop here (Ctrl-C), install the smaller CPU build and run make again:"
	@echo "    $(BIN)/python -m pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu"
	@$(BIN)/python -m pip install --quiet --no-compile "torch>=2.11" torchvision
	@echo "3/3 compiling the CPU kernels and installing zoo with $(NAMES)$(2)"
	@$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation --editable "$(1)"
	@echo "installed in .venv: $$($(BIN)/python -m pip freeze --exclude-editable | grep -E '^($(subst $(SPACE),|,$(NAMES)))=' | xargs)"
endef

.matrix/%/installed: $(SOURCES)
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip "setuptools>=77"
	$(@D)/bin/python -m pip install --quiet $(DEPENDENCIES)
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev]" $(DEPENDENCIES)
	touch $@
