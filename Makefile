# All commands run in .venv, which `make setup` builds from requirements.lock.
PYTHON ?= python3
ARGS   ?=
BIN    := .venv/bin
STAMP  := .venv/.from-lock
UV     := $(BIN)/uv pip
TEST   := $(BIN)/python -m pytest -n 2 --dist worksteal # two at a time; ARGS="-n 0": one after another, in this process
QUICK  := $(TEST) -m "(unit or ranks) and not nightly" --ignore tests/engines --ignore tests/lab # which have neither
ROOMS  := arithmetic step lightning strategies checkpoint config
unexport PYTHONDONTWRITEBYTECODE # uv does not compile packages, so let Python store the bytecode of the first import

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup lowest train sweep dashboard quick coverage test engines lab pages nightly mutants lint docs docs-serve reference schema project lock clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv from requirements.lock, if the lock or pyproject.toml has changed

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make setup PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv .venv
	@echo "installing into .venv: a minute or two the first time, a few GB (PyTorch brings its CUDA libraries)"
	@sed -n '/^uv==/,/# via/p' requirements.lock | $(BIN)/python -m pip install --quiet --require-hashes -r /dev/stdin
	@$(UV) install --python $(BIN)/python --quiet --require-hashes -r requirements.lock || { echo "uv failed; installing with pip"; \
	    $(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock; }
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import lockstep.job.training' # check that it works, and compile its bytecode
	@touch $@

lowest: ## build .venv with the lowest versions that pyproject.toml allows, the rest as new as possible
	@$(PYTHON) -m venv --clear .venv
	@$(PYTHON) scripts/lab/lowest.py pyproject.toml > .venv/lowest.txt
	@$(BIN)/python -m pip install --quiet uv
	@$(UV) install --python $(BIN)/python --quiet --constraint .venv/lowest.txt --editable '.[dev]'
	@touch $(STAMP)

train: setup ## train: make train ARGS="strategy=ddp devices=2"
	@$(BIN)/python src/train.py $(ARGS)

sweep: setup ## train several runs: make sweep ARGS="strategy=dp,ddp devices=1,2"
	@$(BIN)/python src/train.py -m $(ARGS)

dashboard: setup ## open TensorBoard on outputs/, for this machine only; ARGS="--port 6007"
	@$(BIN)/python -m tensorboard.main --logdir outputs --host 127.0.0.1 $(ARGS)

quick: setup ## run the tests that start no process, in a minute
	@$(QUICK) $(ARGS)

coverage: setup ## run them, and print how many lines of six rooms they run
	@$(QUICK) $(ROOMS:%=--cov=lockstep.%) --cov-report= $(ARGS)
	@for room in $(ROOMS); do printf '%-12s %s%%\n' $$room \
	    "$$($(BIN)/python -m coverage report --format=total --include="src/lockstep/$$room/*")"; done

test: setup ## run all tests but those of engines, of the lab and of the night
	@$(TEST) -m "not engine and not lab and not nightly" $(ARGS)

engines: setup ## run the tests that start ranks by torchrun, SLURM, MPI and Ray (tests/engines/install.sh installs them)
	@$(TEST) -m "engine and not nightly" $(ARGS)

lab: setup ## run the tests of scripts/lab/
	@$(TEST) -m "lab and not nightly" $(ARGS)

pages: setup ## build the documentation, and run the commands on its pages
	@$(MAKE) --no-print-directory docs
	@$(TEST) tests/docs tests/test_repo.py $(ARGS)

nightly: setup ## run what takes longer than CI may, and write docs/results/nightly.md
	@$(BIN)/python scripts/lab/nightly.py $(ARGS)

mutants: setup ## change arithmetic, step and checkpoint at random places, and write docs/results/mutants.md: what tests notice
	@$(BIN)/python scripts/lab/mutation.py $(ARGS)

lint: setup ## run ruff (rules and format) and mypy, and check the order of the rooms
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tests/extras_of_the_core.py

docs: setup ## build the documentation into site/; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: setup ## serve the documentation at http://127.0.0.1:8000 and rebuild it when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000 $(ARGS)

schema: setup ## write conf/schema/, with which editors complete and check the keys of conf/
	@$(BIN)/python -m lockstep schema

project: setup ## begin your own project: make project NAME=dogs DIR=../dogs
	@$(BIN)/python -m lockstep new "$(NAME)" "$(DIR)" $(ARGS)

reference: setup ## write the parts of docs/ that follow from code: keys, refusals, the Python API
	@$(BIN)/python docs/reference.py

lock: setup ## resolve pyproject.toml into requirements.lock again (LOCK="--upgrade": the newest versions)
	@$(UV) compile --python $(BIN)/python --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --custom-compile-command "make lock" --extra dev $(LOCK) pyproject.toml --output-file requirements.lock

clean: ## remove caches and .venv, never outputs/ or data/
	@rm -rf .venv .coverage mutants .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site src/*.egg-info
	@find src scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
