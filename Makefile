# make demo    set up, fetch the model, start, send real prompts, show the draft learning, leave it serving
# make test    set up and pass every test that a CPU can run, but for the pools end to end
# make pools   those: three engines, a swap and two deaths, some minutes
# make setup   the virtual environment .venv, from requirements/cpu.lock; does nothing when it is up to date

VENV  := .venv
BIN   := $(VENV)/bin
LOCK  := requirements/cpu.lock
STAMP := $(VENV)/.paceline-installed
CODE  := wire launch server drafter learner rl loadtest

.DEFAULT_GOAL := help
.PHONY: help setup demo down test lint format unit rigs server-rl-rigs other-rigs engine e2e pools bars clean

help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	@set -e; \
	python=''; \
	for candidate in "$$PYTHON" python3.11 python3 python3.12 python3.13; do \
	    if [ -n "$$candidate" ] && command -v "$$candidate" >/dev/null 2>&1 && \
	       "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	        python="$$candidate"; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'Paceline needs Python 3.11, 3.12 or 3.13 and none was found. Install one, or name it: make setup PYTHON=/path/to/python3.11' >&2; \
	    exit 1; \
	fi; \
	echo "[1/4] $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@echo "[2/4] installing $$(grep -c '==' $(LOCK)) packages, about 3.5 GB and a minute or two once downloaded"
	@$(BIN)/python requirements/install.py $(LOCK) $(VENV)/install.log
	@echo '[3/4] installing paceline itself'
	@$(BIN)/python -m pip install --no-deps --no-build-isolation --disable-pip-version-check --quiet -e .
	@echo '[4/4] checking'
	@$(BIN)/paceline version
	@touch $@

demo: setup
	@$(BIN)/paceline demo

down:
	@$(BIN)/paceline down

# Lint and unit tests take a core each, and so do the rigs, which wait more than they work; engines want the machine for themselves.
test: setup
	@$(MAKE) --no-print-directory --output-sync=target -j2 lint unit
	@$(MAKE) --no-print-directory --output-sync=target -j2 server-rl-rigs other-rigs
	@$(MAKE) --no-print-directory engine e2e

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: setup
	$(BIN)/python -m pytest tests/unit -m "not rig"

rigs: server-rl-rigs other-rigs

server-rl-rigs: setup
	$(BIN)/python -m pytest tests/unit/server tests/unit/rl -m rig

other-rigs: setup
	$(BIN)/python -m pytest tests/unit --ignore tests/unit/server --ignore tests/unit/rl -m rig

engine: setup
	$(BIN)/python -m pytest tests/engine

e2e: setup
	$(BIN)/python -m pytest tests/e2e -m "not pools"

pools: setup
	$(BIN)/python -m pytest tests/e2e -m pools

bars: setup
	$(BIN)/paceline bench bars

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
