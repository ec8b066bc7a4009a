# Each verb is a thin alias: what it runs can be typed by hand once the environment is active.
PYTHON ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.tigon-installed

.PHONY: help setup demo test test-gpu test-kernels test-kernels-newest zoo zoo-newest check fix clean

help:
	@echo "make demo        train a small model twice, native and patched, and draw the comparison"
	@echo "make test        the tests that need no GPU"
	@echo "make test-gpu    all tests on the GPU"
	@echo "make test-kernels         the tests that need Hugging Face's kernels package"
	@echo "make test-kernels-newest  the same with the newest transformers that kernels can be had for ($(NEWEST))"
	@echo "make zoo         patch every language model of transformers, compare, write docs/architectures.md"
	@echo "make zoo-newest  the same with the newest transformers, in an environment of its own ($(NEWEST))"
	@echo "make check       lint, format, types, spelling"
	@echo "make fix         what lint and format can repair by themselves"
	@echo "make setup       only the environment ($(VENV))"
	@echo "make clean       remove the environment and all outputs"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements-dev.txt tools/setup.sh
	@sh tools/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tigon demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest --device cuda $(ARGS)

# Apart: with kernels in use no model of transformers can be pickled, which other tests do.
test-kernels: $(STAMP)
	USE_HUB_KERNELS=YES $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/hub --ignore tests/hub/test_layers.py $(ARGS)

# A release of transformers may ask for a release of kernels that is not there yet; pip then takes one before it.
test-kernels-newest:
	@sh tools/setup.sh "$(PYTHON)" "$(NEWEST)"
	$(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade "transformers[kernels]"
	$(NEWEST)/bin/python -c "import kernels, transformers as t; print('transformers', t.__version__, 'kernels', kernels.__version__)"
	USE_HUB_KERNELS=YES $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/hub $(ARGS)

zoo: $(STAMP)
	$(BIN)/python -m tests.zoo --workers $(WORKERS) --table docs/architectures.md $(ARGS)

# Drift shows here before it shows to users: the pinned environment with transformers, and what it needs, replaced.
zoo-newest:
	@sh tools/setup.sh "$(PYTHON)" "$(NEWEST)"
	$(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade transformers
	$(NEWEST)/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	$(NEWEST)/bin/python -m tests.zoo --workers $(WORKERS) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/codespell src compat tests docs examples tools benchmarks *.md

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(NEWEST) demo-output build dist compat/*/build compat/*/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src compat tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
