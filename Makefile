# Two commands: `make serve` and `make test`. Both set up .venv by themselves from constraints.txt with plain pip.

.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
TESTS ?= tests
# One more than the two cores that tests are made for: tests of deployments wait for most of their time.
JOBS ?= 3
# schemathesis is used as a library: its plugin takes seconds to import, in every process. Without bytecode on disk every
# process would compile all modules again, and pytest rewrite all asserts.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -p no:schemathesis

# In every environment, that of build back-ends included: no other torch than the one this was tested with.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve test quick check lint types contracts tests soak faults containers gpu gpu-check vllm install docs clean

help: ## Show what there is
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

serve: $(STAMP) ## Serve the embedded model; PORT=9000, HOST=, ARGS='--decode 2 ...'
	@exec $(BIN)/diptych serve --host $(HOST) --port $(PORT) $(ARGS)

# Types and contracts beside the tests: what they found is shown at once if it is an error, and at the end.
test: lint ## Lint, types, import contracts and all tests but the soaks
	@mkdir -p .run; { $(MAKE) --no-print-directory -k types contracts > .run/checks.log 2>&1 \
		|| { cat .run/checks.log; exit 1; }; } & \
	$(MAKE) --no-print-directory tests; failed=$$?; \
	wait $$! || failed=1; cat .run/checks.log; exit $$failed

check: lint types contracts ## Lint, types and import contracts

lint: $(STAMP) ## ruff: rules and layout
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

contracts: $(STAMP) ## Who may import whom
	@mkdir -p .run
	@$(BIN)/lint-imports > .run/contracts.log 2>&1 || { cat .run/contracts.log; exit 1; }
	@tail -n 2 .run/contracts.log

quick: JOBS = 2
quick: lint contracts ## What can be said in a minute: lint, contracts, and unit tests but for the slow ones
	@$(PYTEST) tests/unit --quick -n $(JOBS) --dist loadfile -q $(ARGS)

tests: $(STAMP) ## All tests but the soaks; TESTS=tests/unit for some, JOBS=1 one by one
	@$(PYTEST) $(TESTS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(STAMP) ## The long ones; property tests look for new examples
	@HYPOTHESIS_PROFILE=explore $(PYTEST) $(TESTS) -m slow $(ARGS)

faults: $(STAMP) ## Faults in every phase, migration, chaos: .run/faults/report.md; ARGS='kill chaos' for some
	@$(BIN)/python -m tests.faults.run --out .run/faults $(ARGS)

containers: $(STAMP) ## The image and compose in a real container engine: .run/containers/report.md; needs root and Debian
	@$(BIN)/python -m tests.containers.run --out .run/containers

gpu: $(STAMP) ## Those that need a CUDA device
	@$(PYTEST) $(TESTS) -m gpu $(ARGS)

gpu-check: $(STAMP) ## What only a CUDA device can tell, within eight minutes: .run/gpu_check/result.json; Error 3 without one
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

vllm: $(STAMP) ## vLLM's build for CPUs in .vllm, and the tests that need it; ARGS='-k served' for some
	@PYTHON="$(PYTHON)" deploy/install_vllm.sh
	@TEST_VLLM_PYTHON=$(CURDIR)/.vllm/bin/python $(PYTEST) tests/vllm --override-ini timeout=1500 $(ARGS)

docs: $(STAMP) ## Write what is generated: docs/configuration.md, JSON Schemas, dashboards, docs/results
	@$(BIN)/python -m services.cli.serve.settings_reference > docs/configuration.md
	@$(BIN)/diptych serve --config-schema > docs/configuration.schema.json
	@$(BIN)/diptych dashboards --out deploy/grafana > /dev/null
	@$(BIN)/python -m services.dashboard.runbook docs/dashboards.md
	@$(BIN)/python -m tests.unit.gateway.exported_metrics
	@$(BIN)/python -m services.cli.serve.file_schemas plan > docs/plan.schema.json
	@$(BIN)/python -m services.cli.serve.file_schemas profile > docs/profile.schema.json
	@$(BIN)/python -m benchmarks.results_tables

install: $(STAMP) ## Make .venv, or bring it up to date

# Installed again when what is to be installed has changed, not when the clock says so (clones have new file times).
WANTED := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(WANTED))
.PHONY: $(STAMP)
endif

$(STAMP):
	@PYTHON="$(PYTHON)" WANTED="$(WANTED)" deploy/install.sh

clean: ## Remove .venv and everything that tools left behind
	rm -rf $(VENV) .run build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
