PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
INSTALLED := .venv/.installed
RAY := .venv/.ray
MINUTES ?= 10
SEED ?= 0
CASES ?= 2
SOURCES := $(wildcard src tests benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all core check bench docs dist chaos campaign clean
.DELETE_ON_ERROR:

help:  ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO)  ## train a small model on handwritten digits and draw how it went
	@$(BIN)/phalanx demo digits

# Processes beside one another: some share all tests but those on the fake accelerator. Hosts wait for time-outs, so
# that all tests take three. The order follows from SEED alone.
define tests
	@$(BIN)/python -m compileall -q src tests
	@mkdir -p out && export OMP_NUM_THREADS=1; \
		$(BIN)/python -m pytest -q -p no:xdist --randomly-seed=$(SEED) -m "accelerator$(1)" tests/accelerator tests/devices \
			> out/accelerator.txt 2>&1 & \
		$(BIN)/python -m pytest -q -n $(2) --dist worksteal --randomly-seed=$(SEED) -m "not accelerator$(1)"; rest=$$?; \
		wait $$!; apart=$$?; cat out/accelerator.txt; exit $$((rest ? rest : apart))
endef

test: $(INSTALLED)  ## the tests, the same ones every time; under four minutes
	$(call tests, and not campaign and not house,2)

test-all: export PHALANX_CASES := $(CASES)
test-all: export PHALANX_DRAW := $(SEED)
test-all: $(INSTALLED) $(RAY)  ## all tests; of long lists of cases two that SEED draws: 40 minutes on two cores; CASES=all: more
	$(call tests,,3)

core: $(INSTALLED)  ## the core's tests, where phalanx has no satellites: what CONTRIBUTING says it can do without
	@rm -rf out/core && mkdir -p out/core && cp -r src/phalanx out/core && cd out/core/phalanx && \
		rm -rf backend collectives integrations lab manual frameworks/tinygrad
	@export OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/out/core; $(BIN)/python -m pytest -q -n 2 --dist worksteal \
		--randomly-seed=$(SEED) -m "not accelerator and not campaign and not house"

check: $(INSTALLED)  ## lint, format, types and the house rules; under a minute
	@$(BIN)/ruff check -q $(SOURCES)
	@$(BIN)/ruff format -q --check $(SOURCES)
	@$(BIN)/pyright --warnings & \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:xdist -m house tests/house; rules=$$?; \
		wait $$! && exit $$rules

bench: $(INSTALLED)  ## time steps and scaling beside the plain loop and DDP; about two hours; writes benchmarks/results
	@$(BIN)/python benchmarks/step.py --save
	@$(BIN)/python benchmarks/price.py --save
	@$(BIN)/python benchmarks/scaling.py --save
	@$(BIN)/python benchmarks/backend.py --save
	@$(BIN)/python benchmarks/recovery.py --save
	@$(BIN)/python benchmarks/step.py --framework jax --rounds 3 --save
	@$(BIN)/python benchmarks/hosts.py --replicas 4 --save

docs: out/docs/.installed  ## the documentation as a site in out/site; needs the network once
	@out/docs/bin/mkdocs build -q --strict -d out/site
	@echo "out/site/index.html"

out/docs/.installed: pyproject.toml
	@$(PYTHON) -m venv --clear out/docs
	@out/docs/bin/pip install -q --disable-pip-version-check mkdocs-material 'mkdocstrings[python]'
	@touch $@

dist: $(INSTALLED)  ## wheel and sdist in dist/, tried: installed into a fresh environment, where a recipe and the backend run
	@rm -rf dist out/fresh && $(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist .
	@$(BIN)/pip install -q --disable-pip-version-check build twine && $(BIN)/python -m build -q --sdist -o dist .
	@$(BIN)/twine check --strict dist/*
	@$(PYTHON) -m venv out/fresh
	@out/fresh/bin/pip install -q --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[demo]"
	@out/fresh/bin/pip check
	@cd out/fresh && bin/phalanx demo digits --quiet --workers 2 && bin/python ../../benchmarks/installed.py
	@ls dist

chaos: $(INSTALLED)  ## kill workers at random for five minutes; every digest must be right
	@$(BIN)/python benchmarks/chaos.py --minutes 5

campaign: chaos  ## make chaos, then random attacks (Ctrl-C, threads, kills, forks, full disks), MINUTES=10 each: hours
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/attacks.py --minutes $(MINUTES)

clean:  ## remove caches and build outputs; .venv stays
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . \( -path ./.venv -o -path ./.git \) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# Done once; done again when what is to be installed changes. A demonstration needs less than tests.
$(DEMO): pyproject.toml constraints.txt
	@echo "Installing phalanx into .venv; the first time this downloads torch and takes about a minute."
	@test -x $(BIN)/python -a -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "Installing the tools that tests need into .venv; the first time this takes about a minute."
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(RAY): $(INSTALLED)
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[ray]' || echo "without Ray, its tests are skipped"
	@touch $@

.venv: $(INSTALLED)
