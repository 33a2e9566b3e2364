# make demo and make test set up by themselves, with or without a GPU. PYTHON, VENV, TORCH and TRITON may be set.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# Dozens of processes import the same modules: their bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# The newest Triton that pyproject.toml allows. compile-newest tests with it.
TRITON_NEWEST ?= triton==3.9.0
NEWEST := .triton-newest/$(TRITON_NEWEST)

# What make snapshot records and make compare reads.
SNAPSHOT ?= .snapshot.json

STAMP := $(VENV)/stamp
PY := $(VENV)/bin/python
# Two processes, if pytest-xdist is installed; a machine without a network may lack it.
PARALLEL = $$($(PY) -c 'import xdist; print("-n 2 --dist worksteal")' 2>/dev/null || true)

# FAMILY=norms takes the tests of one family; this is sound, because families do not import each other.
TESTS = $(PARALLEL) $(if $(FAMILY),--family $(FAMILY))

.PHONY: help setup demo test lint unit gpu interpret newest compile-newest ops api coverage weight snapshot compare format clean

help:
	@echo "make demo            plan, explain and run on real data"
	@echo "make test            lint, unit, gpu, interpret and compile-newest; FAMILY=norms: the tests of one family"
	@echo "make lint            ruff check, ruff format --check, mypy --strict"
	@echo "make unit            tests that need neither a GPU nor the interpreter"
	@echo "make gpu             tests that need a GPU; without one, says so and does nothing"
	@echo "make interpret       Triton kernels in Triton's interpreter, on the CPU"
	@echo "make compile-newest  compile tests and launcher tests with $(TRITON_NEWEST)"
	@echo "make ops             rewrite OPS.md and the table in README.md"
	@echo "make api             rewrite tests/core/api.txt, the record of the public API"
	@echo "make coverage        count what the tests show of each entry of the kernel table"
	@echo "make weight          figures of the tree beside their goals"
	@echo "make snapshot        record what planning decides, in $(SNAPSHOT)"
	@echo "make compare         plan again and compare with $(SNAPSHOT)"
	@echo "make format          ruff's fixes and formatting"
	@echo "make clean           remove what the others built"

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup.sh
	@start=$$SECONDS; tools/setup.sh $(VENV) $(PYTHON) $(TORCH) $(TRITON); echo "set-up: $$((SECONDS - start)) s"
	@touch $@

demo: $(STAMP)
	@$(PY) -m triplan.cli demo

# Linting and fetching keep one core busy, so they run beside the tests. So does compiling with the newest Triton, which
# ends before the tests do: a third process that shares two cores with their two leaves neither core idle.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 3 lint unit compile-newest
	@$(MAKE) --no-print-directory -j 1 gpu interpret
	@echo "make test: all passed"

# A machine without a network may lack ruff or mypy; set-up lists what is missing in $(VENV)/offline.
lint: $(STAMP)
	@if grep -qsx ruff $(VENV)/offline; then echo "lint: ruff is not installed and cannot be fetched: skipped"; else \
	  $(PY) -m ruff check . && $(PY) -m ruff format --check .; fi
	@if grep -qsx mypy $(VENV)/offline; then echo "lint: mypy is not installed and cannot be fetched: skipped"; else \
	  $(PY) -m mypy; fi

unit: $(STAMP)
	$(PY) -m pytest -m "not gpu and not interpret" $(TESTS)

# Compiling takes most of the time, so eight processes share the card; the largest tests take 20 GB of its memory each.
GPU_PARALLEL = $$($(PY) -c 'import xdist; print("-n 8 --dist worksteal")' 2>/dev/null || true)

gpu: $(STAMP)
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(PY) -m pytest -m gpu $(GPU_PARALLEL) $(if $(FAMILY),--family $(FAMILY),&& $(PY) -m pytest -m gpu tests/core/test_modules.py); else \
	  echo "gpu: no GPU here: tests marked gpu were not run"; fi

interpret: $(STAMP)
	TRITON_INTERPRET=1 $(PY) -m pytest -m interpret $(TESTS)

newest: $(STAMP)
	@if [ ! -e $(NEWEST)/done ]; then rm -rf $(NEWEST); \
	  $(PY) -m pip install -q --disable-pip-version-check --retries 1 --no-deps --target $(NEWEST) $(TRITON_NEWEST) 2>/dev/null \
	    && touch $(NEWEST)/done || rm -rf $(NEWEST); fi

# One process: a second would plan the compile matrix again.
compile-newest: newest
	@if [ -e $(NEWEST)/done ]; then PYTHONPATH=$(NEWEST) $(PY) -m pytest $(if $(FAMILY),--family $(FAMILY)) \
	  --matrix=few tests/contracts/binaries tests/core/test_launcher.py; else \
	  echo "compile-newest: $(TRITON_NEWEST) cannot be fetched here: skipped"; fi

ops: $(STAMP)
	$(PY) -m triplan.cli ops --markdown > OPS.md.new && mv OPS.md.new OPS.md
	$(PY) -m triplan.cli ops --summary | $(PY) tools/readme_table.py

api: $(STAMP)
	$(PY) tools/api.py > tests/core/api.txt.new && mv tests/core/api.txt.new tests/core/api.txt

coverage: $(STAMP)
	$(PY) tools/coverage_list.py --summary

weight:
	$(PYTHON) tools/weight.py

snapshot: $(STAMP)
	$(PY) tools/snapshot.py record $(SNAPSHOT)

compare: $(STAMP)
	$(PY) tools/snapshot.py compare $(SNAPSHOT)

format: $(STAMP)
	$(PY) -m ruff check --fix . && $(PY) -m ruff format .

clean:
	rm -rf $(VENV) .triton-newest dist build
