# Everything runs from one cache folder: $GPU_TOPOLOGY_CACHE, else .cache here. `make help` lists the targets.

PYTHON ?= python3
BIN := .cache/venv/bin
CHECKED := $(wildcard __main__.py) benchmarks cli components host policies testbed tests topology

.DEFAULT_GOAL := help
.PHONY: help setup doctor demo test simulator bench lint format schema clean lab test-lab

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

setup: ## get the engine, the plugins and the Python packages ready (minutes the first time, a moment after that)
	@$(PYTHON) -m testbed.engine.setup

doctor: ## show which engine and plugins are used, and what is missing
	@$(PYTHON) -m testbed.engine.doctor

demo: setup ## split kpro6's GPUs, merge them and split them again, on the simulated hypervisor
	@$(BIN)/python -m testbed.demo

test: setup ## run the tests, the engine's included; those of the lab on the simulator
	@$(BIN)/python -m pytest -n 2

simulator: setup ## start the simulated hypervisor that Pulumi.sim.yaml describes, and say how to reach it
	@$(BIN)/python -m testbed.simulator --port 2222 --api-port 8006 --dir .cache/simulator

bench: setup ## compare previews with an empty Pulumi program's, and count the visits to the host
	@$(BIN)/python -m benchmarks.preview

lint: setup ## check style and types
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/mypy $(CHECKED)

format: setup ## format the code and mend what can be mended safely
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

schema: setup ## write the JSON Schema of the stack file into schema/
	@$(BIN)/python -m topology.schema

clean: ## remove the clone's cache and what the tools left behind
	@rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

lab: setup ## boot the lab, a hypervisor in QEMU on a real kernel (INSTALL=1 as below; needs root, to build its image)
	@$(BIN)/python -m testbed.lab $(if $(INSTALL),--install)

test-lab: setup ## run the tests of tests/lab on the lab (INSTALL=1: install the Debian packages that it needs)
	@$(BIN)/python -m testbed.lab --check $(if $(INSTALL),--install)
	@GPU_TOPOLOGY_LAB=1 $(BIN)/python -m pytest tests/lab
