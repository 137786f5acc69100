# Two commands do everything from a clean clone: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint bench docs clean

# The stamp depends on what the environment is made of, so a change of the C sources rebuilds the extensions.
STAMP := $(VENV)/.setup
C_SOURCES := $(wildcard aio/*.c aio/*.h aio/_build.py trainer/*.c trainer/*.h trainer/_build.py)

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(C_SOURCES) scripts/setup.sh scripts/install.sh
	PYTHON=$(PYTHON) scripts/setup.sh $(VENV)
	@touch $@

demo: setup
	$(BIN)/tiermem demo

test: setup
	scripts/browser.sh
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@# The viewer's scripts and style. The linter comes as a package for x86-64 only.
	if [ "$$(uname -m)" = x86_64 ]; then $(BIN)/biome ci --error-on-warnings; fi

bench: setup
	$(BIN)/tiermem bench

docs: setup
	$(BIN)/python -m tiermem.config > docs/policy.md
	$(BIN)/python -m tests.compatibility > docs/compatibility.md

clean:
	rm -rf build dist *.egg-info $(VENV) aio/*.so trainer/*.so
