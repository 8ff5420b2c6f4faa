# Two commands do everything on a fresh Debian or Ubuntu machine: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv demo test lint clean

help:
	@echo 'make demo   bring the lab up and run k3deploy apply candidate-U2 to a verdict and a report'
	@echo 'make test   run the tests, lint included; leaves nothing behind'
	@echo 'make lint   run the linters alone'
	@echo 'make clean  take the lab down and remove the virtual environment'

venv:
	@scripts/venv.sh

# A verdict of REJECT (10) or INCONCLUSIVE (11) is a result, not a failure: one pair of starts cannot prove a gain.
demo: venv
	k3deploy lab up --yes
	k3deploy lab model
	k3deploy lab production
	k3deploy apply candidate-U2 --inventory inventory/lab --repeats 1 --yes || { rc=$$?; [ $$rc -eq 10 ] || [ $$rc -eq 11 ] || exit $$rc; }

test: venv
	@scripts/test.sh

lint: venv
	pytest -q tests/lint

clean:
	-@[ -x $(BIN)/k3deploy ] && k3deploy lab down
	rm -rf $(VENV)
