# Everything runs in a virtual environment inside the checkout (.venv); every target sets it up when it is missing or out of date.
#   PYTHON=python3.12     another interpreter (>= 3.10) to make the environment with
#   TORCH_INDEX=URL       take torch from this package index (a CPU-only or another CUDA build); the default is what pip finds
#   ARGS="--port 8000"    passed on to the command
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Two workers run the notebooks and the tests, one thread each.
# Idle OpenMP threads that spin starve their neighbours when several processes share the cores.
export GOMP_SPINCOUNT ?= 5000
QUICK := MINISGL_QUICK=1 TRITON_INTERPRET=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
WORKERS ?= 2

.NOTPARALLEL:
.PHONY: help setup serve fetch lab bench test test-sync test-notebooks test-outputs test-pytest stress export html clean

help:
	@echo "make serve   fetch the default model, start the server, print its URL and a curl to try (ARGS=... for its flags)"
	@echo "make lab     open the book in JupyterLab"
	@echo "make bench   the engine against transformers on this machine (ARGS=--llama: llama.cpp too; needs pip install xllamacpp in .venv)"
	@echo "make test    everything: notebooks in step, executed, outputs compared, and the test suite"
	@echo "make stress  200,000 random scheduler steps against every invariant (ARGS=\"--steps 5000 --seed 3\");"
	@echo "             with a class of your own, from mine.py beside this file: ARGS=\"--policy mine:Turns\", --cache, --attention-backend"
	@echo "make html    the book as web pages, in _book/"
	@echo "make export  notebooks -> modules, and clean the notebooks"
	@echo "make setup   only the environment; make fetch: only the model"
	@echo "make clean   remove the environment and all that was built"
	@echo 'variables:   ARGS="--port 8000"  PYTHON=python3.12  TORCH_INDEX=https://download.pytorch.org/whl/cpu  WORKERS=2'

setup: $(READY)

$(READY): settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or later is needed, this is %d.%d; try make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "== setting up $(VENV): a minute or more, about 3 GB (several GB more with a CUDA build of torch); pip says nothing meanwhile"
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module does not work here; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -qq --upgrade pip
	@if [ -n "$(TORCH_INDEX)" ]; then $(BIN)/python -m pip install -qq --index-url "$(TORCH_INDEX)" \
	  "$$($(BIN)/python -c 'import configparser; c = configparser.ConfigParser(delimiters=["="]); c.read("settings.ini"); print(next(r for r in c["DEFAULT"]["requirements"].split() if r.startswith("torch")))')"; fi
	@$(BIN)/python -m pip install -qq -e '.[dev]'
	@touch $@

serve: $(READY)
	@$(BIN)/minisgl-edu serve $(ARGS)

fetch: $(READY)
	@$(BIN)/minisgl-edu fetch $(ARGS)

lab: $(READY)
	@cd nbs && ../$(BIN)/jupyter trust *.ipynb > /dev/null  # or JupyterLab hides stored SVG, the map of the engine
	@cd nbs && ../$(BIN)/jupyter lab --ZMQChannelsWebsocketConnection.kernel_ws_protocol= $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/index.ipynb $(ARGS)

bench: $(READY)
	@$(BIN)/minisgl-edu bench $(ARGS)

test: $(READY)
	@$(MAKE) --no-print-directory test-sync test-notebooks test-outputs test-pytest

test-sync: $(READY)
	@echo "== 1/4 notebooks and modules in step"
	@$(BIN)/python tests/check_sync.py

test-notebooks: $(READY) fetch
	@echo "== 2/4 every notebook runs from top to bottom (small counts)"
	@$(QUICK) OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers $(WORKERS) --timing --do_print

test-outputs: $(READY) fetch
	@echo "== 3/4 the stored outputs are what the cells give"
	@$(QUICK) OMP_NUM_THREADS=1 $(BIN)/python tests/check_outputs.py --workers $(WORKERS)

test-pytest: $(READY) fetch
	@echo "== 4/4 the test suite"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --timeout=300 --durations=10 tests

stress: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/stress.py $(ARGS)

export: $(READY)
	@$(BIN)/nbdev_export && $(BIN)/nbdev_clean

html: $(READY)
	@$(BIN)/python nbs/html/build.py _book

clean:
	rm -rf $(VENV) _book _docs build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
