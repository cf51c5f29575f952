# make help lists what there is. Everything happens in a local virtual environment, .venv.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup study test test-slow test-all lint types bench docs page dist support support-page clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/' | expand -t 18

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hesscond needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed ## make the virtual environment (done by the others when needed)

study: setup ## the main job on embedded real data: vanilla and BNP on scikit-learn's digits
	$(BIN)/hesscond study fc-digits --method vanilla --method bnp

# every worker of pytest would rewrite and compile all tests again
unexport PYTHONDONTWRITEBYTECODE

test: setup ## the tests, without the slow ones, on all cores (HESSCOND_SHARE: tests/README.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8

# those of the support table are run by `make support`
test-slow: setup ## the slow tests: many random trials, real CIFAR-10 (HESSCOND_DATA_DIR), processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n auto --maxprocesses 8 --ignore tests/support

test-all: export HESSCOND_SHARE = all
test-all: test test-slow ## all cases of all tests, in hours; the others run a share that turns with the commit

lint: setup ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy
	$(BIN)/mypy

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

bench: $(VENV)/.bench ## what studies and exact Hessians cost, other tools beside them (HESSCOND_DATA_DIR)
	$(BIN)/python benchmarks/everyday.py --only study --threads 1
	$(BIN)/python benchmarks/engine.py

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation into build/docs, no warnings, no broken links (TRIALS=5: sooner)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --quiet --jobs auto --fail-on-warning --keep-going -b html docs build/docs
	$(BIN)/python docs/check_site.py build/docs

page: $(VENV)/.docs ## build one page of the documentation (soon from the second time on): make page PAGE=howto/ci
	OMP_NUM_THREADS=1 PAGE=$(PAGE) $(BIN)/python -m sphinx --quiet -b html docs build/page docs/$(PAGE).md

dist: ## build sdist and wheel, and try the wheel in a new environment and an empty folder
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/tools
	build/dist/tools/bin/python -m pip install --quiet --disable-pip-version-check build
	build/dist/tools/bin/python -m build --outdir dist
	$(PYTHON) -m venv build/dist/new
	build/dist/new/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) dist/*.whl
	mkdir build/dist/empty
	cd build/dist/empty && ../new/bin/hesscond --version && ../new/bin/hesscond verify van-der-sluis
	build/dist/new/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) "$$(ls dist/*.whl)[studies]"
	cd build/dist/empty && ../new/bin/hesscond study fc-digits -m vanilla --iterations 5

# other libraries' models; what the benchmarks compare with needs a torchvision that these do not work with
$(VENV)-support/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)-support
	$(VENV)-support/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[support]'
	@touch $@

support: $(VENV)-support/.installed ## the support table's tests, and those of loggers and trainers, with the libraries
	OMP_NUM_THREADS=1 $(VENV)-support/bin/python -m pytest -m '' -n auto --maxprocesses 4 tests/support tests/watching/test_watch.py

support-page: $(VENV)-support/.installed ## write the support table (docs/support.md)
	OMP_NUM_THREADS=1 $(VENV)-support/bin/python tests/support/page.py

clean: ## remove what the others made (runs/ stays)
	rm -rf $(VENV) $(VENV)-support build docs/methods docs/statements docs/gallery dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
