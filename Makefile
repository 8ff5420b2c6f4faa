# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv demo test test-long lint clean

help:
	@echo 'make demo   bring the lab up and run k3deploy apply candidate-U2 to a verdict and a report'
	@echo 'make test   run the tests, lint included; leaves nothing behind'
	@echo 'make test-long   inject every fault, and prove RDMA on an emulated machine'
	@echo 'make lint   run the linters alone'
	@echo 'make clean  take the lab down and remove the virtual environment'

venv:
	@scripts/venv.sh

# A verdict of REJECT (10) or INCONCLUSIVE (11) is a result, not a failure: one pair of starts cannot prove a gain.
demo: venv
	k3deploy lab up --yes
	k3deploy lab model
	k3deploy lab production
	k3deploy apply candidate-U2 --inventory inventory/lab --yes || { rc=$$?; [ $$rc -eq 10 ] || [ $$rc -eq 11 ] || exit $$rc; }

test: venv
	@scripts/test.sh --ignore tests/rdma --ignore tests/lint/test_faults_doc.py -m 'not fault'

# What takes longest: the table of injected faults (docs/faults.md), and the emulated machine in which RDMA activates.
test-long: venv
	@scripts/test.sh -m fault tests/e2e
	pytest -q tests/lint/test_faults_doc.py
	@scripts/test.sh tests/rdma

lint: venv
	pytest -q tests/lint

clean:
	-@[ -x $(BIN)/k3deploy ] && k3deploy lab down
	rm -rf $(VENV) runs
