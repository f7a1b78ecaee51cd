# Two commands do everything from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE_FILES := pyproject.toml constraints.txt

.PHONY: demo test fuzz test-slow test-cuda cuda wheels zoo lint format-check types docs check bench clean

# torch comes first and alone: nothing that follows may pull in another build of it. The search is compiled at once, so
# that nobody's first plan waits for it.
$(VENV)/ready: $(PACKAGE_FILES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,examples,explore,zoo,frameworks]'
	$(BIN)/python -m panpipe.core.search.compiling
	touch $@

demo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train_gpt2.py --out out/demo

# A process a core and one more, each with a file of tests at a time: what tests of a file share is made once. The largest
# file comes last, and has processes of its own for all cores. The search is compiled before, not by each process. UTF-8
# whatever the locale: Inductor is not imported without it. Bytecode is written whatever the environment: many tests start
# processes.
test: $(VENV)/ready
	$(BIN)/python -m panpipe.core.search.compiling
	PYTHONDONTWRITEBYTECODE= PYTHONUTF8=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not cuda" --durations=10 \
		-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder tests

test-slow: $(VENV)/ready
	PYTHONUTF8=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or cuda" tests

# On a machine with a GPU and no network: its own Python and torch, and packages that it lacks from wheels/.
cuda:
	PY=$(PYTHON) bash benchmarks/gpu/lease.sh first; PY=$(PYTHON) bash benchmarks/gpu/lease.sh second

# What `make cuda` needs in addition to torch, numba and the other required packages; run it where there is a network.
wheels:
	$(PYTHON) -m pip download --quiet --no-deps --dest wheels simpy cattrs

# The tests that need a GPU, likewise.
test-cuda:
	PY=$(PYTHON) bash benchmarks/gpu/lease.sh tests

# Every model of the zoo, by nine plans each; the table goes to benchmarks/results/zoo.md.
zoo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/laws/zoo/table.py

# Mutated files of every format: only clear errors, no traceback, no hang, no memory bomb. Faulty files: out/fuzz.
fuzz: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py --count 100000

# A text file that is opened without an encoding has that of the locale.
lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .

format-check: $(VENV)/ready
	$(BIN)/ruff format --check .

# An editable install maps the root folder to the package, which type checkers do not follow: check an installed copy.
# All of build goes first: setuptools would install modules from there that the sources no longer have.
types: $(VENV)/ready
	rm -rf build
	PANPIPE_COMPILE=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/types .
	cd build && MYPYPATH=types ../$(BIN)/mypy --config-file ../pyproject.toml -p panpipe

# The API reference reads an installed copy, as the type checker does.
docs: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	rm -rf build
	PANPIPE_COMPILE=0 $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/types .
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m panpipe.explore.static build/site/explorer

check: test lint format-check types

bench: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtime/two_workers.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtime/contests.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtime/action_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtime/host_time.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/prediction/links.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/prediction/prediction.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/prediction/prediction.py --models GPT --schedules 1f1b,zb-v,v-half,v-min --ranks 4 --loads 0
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/published/papers.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/core/micro.py
	$(BIN)/python benchmarks/planning/bench_search.py

clean:
	rm -rf $(VENV) build out
