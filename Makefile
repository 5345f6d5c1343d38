PYTHON ?= python3
UV ?= uv
BIN := .venv/bin
INSTALLED := .venv/.installed
PARITY := .venv/.parity
ARGS ?=

# Packages are installed without bytecode, which their first import keeps. Where that were forbidden, every command would
# compile all that it imports: importing the trainer then takes 7.5 s of the processor instead of 2.4.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help install parity quickstart test test-slow test-quickstart lint pins clean

help:
	@echo "make quickstart                              install, build the corpus, train runs/quickstart (or resume it)"
	@echo "make quickstart ARGS='--run-dir runs/short --set train.steps=200'"
	@echo "                                             the same with options of 'curriculum train'"
	@echo "make test                                    install, run the tests"
	@echo "make parity                                  install torch, transformers, peft and lm-eval: with them the tests"
	@echo "                                             also hold imports and exports against these"
	@echo "make test-slow                               the slow ones: thirty kills, a browser, simulated devices, parity"
	@echo "make test-quickstart                         the quickstart to its end, and what it is told on the way"
	@echo "make lint                                    install, check style and format"
	@echo "make pins                                    resolve requirements.txt again (needs uv)"
	@echo "make clean                                   remove .venv and caches; data and runs stay"
	@echo "PYTHON=/path/to/python3.11 chooses the interpreter of a new .venv"

quickstart: install
	$(BIN)/python tools/build_quickstart_corpus.py --output data/quickstart
	$(BIN)/curriculum train configs/quickstart.yaml --run-dir runs/quickstart --resume latest $(ARGS)

# By file, so that what the tests of a file share is made once; tests/conftest.py begins with the longest.
test: install
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=10 -m "not slow and not quickstart" $(ARGS)

test-slow: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 -m slow $(ARGS)

test-quickstart: install
	$(BIN)/python -m pytest -m quickstart $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(INSTALLED)

# A half-made .venv, or one of an old Python, is made again; --no-compile leaves to the first import what it needs.
$(INSTALLED): requirements.txt pyproject.toml
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)' 2>/dev/null || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON): $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; \
	    exit 1; }; \
	  echo "making .venv with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear .venv; }
	@echo "installing the pinned packages into .venv (a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -r requirements.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

parity: $(PARITY)

# torch alone and first: a build of this version that is there already, such as the one for CPUs, stays.
$(PARITY): $(INSTALLED) requirements-parity.txt
	@echo "installing torch, transformers, peft and lm-eval into .venv (a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile "$$(grep '^torch==' requirements-parity.txt)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -r requirements-parity.txt
	@touch $@

COMPILE := pip compile -q --universal --python-version 3.11 --upgrade --no-emit-index-url --no-annotate --no-header

# What the extras need beyond requirements.txt. The packages for a GPU are those that the installed torch names itself.
pins:
	$(UV) $(COMPILE) --extra dev pyproject.toml --output-file requirements.txt
	$(UV) $(COMPILE) --extra parity --extra judge --constraints requirements.txt pyproject.toml \
	  --output-file requirements-parity.txt
	grep -vxFf requirements.txt requirements-parity.txt | grep -vE '^(nvidia|cuda)-|^triton==' > requirements-parity.tmp
	mv requirements-parity.tmp requirements-parity.txt

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
