# make bench   install what is needed into .venv and run the main job
# make test    install what is needed into .venv and run all tests
# make test-full   the same, with every combination of the kernels' axes instead of every pair
# make docs    draw the timelines of docs/img and write docs/published.md again, from emulated runs
# make help    the rest
#
# CUDA=12 or CUDA=13 picks the CUDA stack (default: 13, or 12 where the installed driver is older than CUDA 13).
# DEVICE=cuda:0, emu:h100, ... picks the device of `make bench`; ARGS="..." is passed on to pytest.

VENV := .venv
BIN := $(VENV)/bin
CUDA ?= $(shell nvidia-smi 2>/dev/null | grep -q 'CUDA Version: 12' && echo 12 || echo 13)
STAMP := $(VENV)/.installed-cu$(CUDA)
ARGS ?=

.PHONY: help install bench docs test test-full lint types check clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml
	@start=$$(date +%s); \
	test -x $(BIN)/python || { python=$$(sh scripts/find-python.sh) && "$$python" -m venv $(VENV); } && \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[cu$(CUDA),dev]' && \
	rm -f $(VENV)/.installed-cu* && touch $@ && echo "install: $$(( $$(date +%s) - start )) s"

bench: install
	@$(BIN)/python -m pytest bench/ -r fE --fallback emu:a100,emu:h100 --benchmark-autosave $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

docs: install
	$(BIN)/python scripts/draw_timelines.py $(ARGS)
	$(BIN)/python scripts/published.py

test: install
	$(BIN)/python -m pytest tests/ -n 2 --dist worksteal -q $(ARGS)

test-full: install
	$(BIN)/python -m pytest tests/ -n 2 --dist worksteal -q --full-product $(ARGS)

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	$(BIN)/mypy smfree kernels bench

check: lint types test

clean:
	rm -rf $(VENV) .hypothesis build *.egg-info .pytest_cache .ruff_cache .mypy_cache
