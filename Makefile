# Thin: sets up .venv from requirements.lock, then calls the tools that do the work. Variables, on the command line:
#   make table2 CONFIG="scale=smoke budget=0.5" CORES=4
#   make test PYTEST_ARGS="tests/test_packaging.py -k lock"
#   make ui PORT=5001
#   make clean setup PYTHON=python3.12
# pip's own settings (PIP_FIND_LINKS, PIP_INDEX_URL, ...) choose where packages come from, and so which build of torch.

CONFIG ?=
CORES ?= all
PORT ?= 5000
PYTEST_ARGS ?=
# 3.11 first: the Python that CI tests with. 3.12 and 3.13 have the same lock.
PYTHON ?= python3.11 python3.12 python3.13 python3 python

VENV := .venv/bin/python
# Touched at the end of an installation, so that an interrupted one does not count.
INSTALLED := .venv/installed
# A few workers with one thread each: a worker takes a gigabyte, and more threads than cores slow all of them down. Files stay whole, so that a
# module's fixtures are made once; tests/conftest.py says which begin, and that there is a worker more than cores.
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What an import compiles when it comes, if at all.
UNCOMPILED := /tests/|/torch/testing/|/transformers/models/

# Before a command that says nothing for minutes: a line every 15 seconds, until the recipe's shell ends. A shell that
# a signal ends runs no trap, so the loop looks for it.
TELL = while sleep 15 > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do echo "relinear: still at it"; done & telling=$$!; trap 'kill $$telling' EXIT;

.PHONY: help table2 test faults lint docs ui setup lock clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' Makefile

table2: setup ## results/table2.csv, the main job: twenty minutes to an hour on two cores; CONFIG=scale=smoke: a minute or two
	@PYTHONSAFEPATH=1 $(VENV) -m relinear.cli table2 --cores $(CORES) $(CONFIG)

test: export OMP_NUM_THREADS = 1
# Where a machine forbids it, each of some hundred processes compiles the sources anew.
test: export PYTHONDONTWRITEBYTECODE =
test: setup ## the tests: 20 to 40 minutes on two cores
	@$(VENV) -c 'import triton' 2> /dev/null || $(VENV) -m pip install --quiet "$$(grep '^triton==' requirements.lock)"
	@echo "relinear: testing"
	@$(VENV) -m pytest -rs $(WORKERS) $(PYTEST_ARGS)

faults: setup ## the fault campaign: malformed settings, damaged results, commands upset while they run; goes on where it stopped
	@mkdir -p results
	@PYTHONPATH=src:kernels $(VENV) tests/faults.py --inputs 1000 --upsets 60 --log results/faults.jsonl

lint: setup ## ruff, snakefmt, snakemake --lint, the numbers of the pages
	@$(VENV) -m ruff check .
	@$(VENV) -m ruff format --check .
	@.venv/bin/snakefmt --check Snakefile workflow
	@$(VENV) -m relinear.draw.quote --check
	@$(VENV) -m pytest -q -p no:cacheprovider tests/test_packaging.py -k snakemake_lint

docs: setup ## the numbers of README.md and docs/ from results/reference, and the pages as a site; a broken link is an error
	@$(VENV) -m relinear.draw.quote
	@.venv/bin/properdocs build
	@echo "relinear: site/index.html is there; the links of README.md lead to the same pages in docs/"

ui: setup ## MLflow on 127.0.0.1
	@echo "relinear: MLflow will be on http://127.0.0.1:$(PORT), in up to half a minute; Ctrl-C ends it"
	@$(VENV) -m relinear.cli track ui --port $(PORT)

setup: $(INSTALLED) ## .venv, as locked; done by the others when needed

# A finished .venv is brought up to date; an unfinished one is made anew.
$(INSTALLED): requirements.lock pyproject.toml setup.py
	@test -e $@ || { \
		for python in $(PYTHON); do \
			"$$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && break; \
			python=; \
		done; \
		test "$$python" || { \
			echo "error: found no Python 3.11, 3.12 or 3.13 with venv and pip (python3-venv on Debian); tried: $(PYTHON)." >&2; \
			for python in $(PYTHON); do "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 14))' 2>/dev/null \
				&& echo "$$("$$python" --version) is too new: immutables, which Snakemake needs, has no wheel for it." >&2 && break; done; \
			echo "Name one: make setup PYTHON=/path/to/python3.12. To get one: uv python install 3.12, or conda env create -f environment.yml." >&2; \
			exit 1; \
		}; \
		echo "relinear: [1/3] making .venv with $$("$$python" --version)"; \
		"$$python" -m venv --clear .venv; \
	}
	@rm -f $@
	@grep -v '^triton==' requirements.lock > .venv/requirements || true # 0.7 GB, which torch's CUDA build brings itself
	@echo "relinear: [2/3] installing $$(grep -c == .venv/requirements) packages: some minutes; 2.4 GB on disk with a CPU build of torch, several more with CUDA"
	@$(TELL) $(VENV) -m pip install --quiet --no-compile --requirement .venv/requirements || { \
		echo "error: pip could not install the packages. Where it says that it found no version or no connection, the network is missing:" >&2; \
		echo "connect to it or name a mirror (PIP_INDEX_URL, or PIP_FIND_LINKS with a folder of wheels), then give the same command again." >&2; \
		exit 1; \
	}
# pip compiles on one core. The packages' own tests are left out, and models, of which a run imports one or two: a third of the work.
	@$(TELL) $(VENV) -m compileall -qq -j 0 -x '$(UNCOMPILED)' .venv/lib || true # some packages hold files that no Python reads
	@echo "relinear: [3/3] installing relinear itself: seconds"
	@$(VENV) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The CUDA packages are left out: torch's CUDA build pins them itself, and its CPU build must not bring them.
lock: setup ## requirements.lock anew, from pyproject.toml; needs the network, changes no pin that still fits
	@$(VENV) -m pip install --quiet uv==0.13.8
	@.venv/bin/uv pip compile --quiet pyproject.toml --output-file requirements.lock
	@grep -vE '^(cuda|nvidia)-' requirements.lock > .venv/lock && mv .venv/lock requirements.lock

clean: ## remove .venv; results and downloaded assets stay
	@rm -rf .venv
