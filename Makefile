# make demo         train three methods on digits over ten heterogeneous workers and draw the figure
# make test         format check, lint, types and tests, the numeric ones also as on another kind of processor
# make slow         the other tests: several machines, notebooks, the documentation, random kills, every case of every law
# make docs         build the documentation site into build/docs, warnings as errors
# make notebooks    execute the notebooks
# make pages        write the parts of the pages anew that are read from the source
# make dist         build the sdist and the wheel into dist/, and check what a registry would check
# make install-test install the wheel with pip into empty environments, without extras and with all, and use it there
PYTHON ?= python3
BIN := .venv/bin
# pip would compile all of torch and Ray: a module is compiled when it is first imported, and that is kept
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow compiled types real methods runs rest numeric browser docs notebooks pages dist install-test clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip # which takes half as long as that of 2023
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

demo: .venv/ready
	rm -rf runs/demo
	$(BIN)/dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=1.0]' \
	    --problem 'digits[workers=10,split=label]' --speeds 'truncated_normal[std=5]' \
	    --time 800 --folder runs/demo

# Five at a time on two cores: real workers wait for one another most of the time, and all else takes the time that they leave.
# What the tests need comes before them, beside the types, which need none of it.
test: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j 3 compiled types browser
	$(MAKE) --no-print-directory -j 5 real methods runs rest numeric

# what a process of tests imports is compiled once, before several at a time would each compile it for themselves
compiled: .venv/ready
	$(BIN)/pytest --collect-only -qq

types: .venv/ready
	$(BIN)/mypy

# real workers have deadlines: they go first, and Ray is not to put its own processes behind all others
real: .venv/ready
	RAY_worker_niceness=0 $(IN_MEMORY) $(BIN)/pytest -m 'real and not slow' $(WITH_RAY)
WITH_RAY := tests/workers tests/runs tests/cli tests/docs

# all that is not real, in three parts that take about as long as one another
IN_methods := $(addprefix tests/,algorithms batching kernels paper)
IN_runs := $(addprefix tests/,core problems runs simulation storage)
IN_rest := tests $(addprefix --ignore=,$(IN_methods) $(IN_runs))
AFTER_REAL := nice -n 19
# a run's folder is flushed to the disk again and again, which thousands of them would wait for
IN_MEMORY = PYTEST_DEBUG_TEMPROOT=$$($(BIN)/python tests/in_memory.py)

methods runs rest: .venv/ready
	$(IN_MEMORY) $(AFTER_REAL) $(BIN)/pytest -m 'not real and not slow and not install' $(IN_$@)

slow: .venv/ready
	RAY_worker_niceness=0 $(IN_MEMORY) $(BIN)/pytest -m slow
	$(IN_MEMORY) $(BIN)/pytest --every-case -m 'not real and not slow and not install' tests/algorithms tests/engine
	$(MAKE) --no-print-directory numeric IN_numeric=tests ARGUMENTS=--every-case

# as another kind of processor, of the rooms where most is compared; IN_numeric=tests is all, ARGUMENTS=--every-case leaves no case out
numeric: .venv/ready
	ATEN_CPU_CAPABILITY=$$($(BIN)/python tests/other_processor.py) $(IN_MEMORY) $(AFTER_REAL) $(BIN)/pytest -m 'numeric and not slow' $(IN_numeric) $(ARGUMENTS)
IN_numeric := $(addprefix tests/,algorithms core engine problems theory)

# the tests of pages and reports drive a browser; what has none skips them and says so
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && \
	    { apt-get install -y --no-install-recommends chromium || \
	      { apt-get update && apt-get install -y --no-install-recommends chromium; }; } > /dev/null 2>&1; } || \
	    echo 'no browser: install chromium, and the pages are tested in it as well'

docs: .venv/ready
	$(BIN)/sphinx-build -W --keep-going -n -b html docs build/docs

notebooks: .venv/ready
	$(BIN)/pytest tests/notebooks

pages: .venv/ready
	for part in $$(grep -l '^if __name__' tests/docs/test_*.py); do PYTHONPATH=tests $(BIN)/python $$part; done
	$(BIN)/ruff format --quiet docs

dist: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

install-test: .venv/ready
	$(BIN)/pytest -m install tests/packaging

clean:
	rm -rf .venv runs build dist
