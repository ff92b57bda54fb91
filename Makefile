# make demo   train three methods on digits over ten heterogeneous workers and draw the figure
# make pages  write the parts of the pages anew that are read from the source
# make test   format check, lint, types and tests, the numeric ones also as on another kind of processor
PYTHON ?= python3
BIN := .venv/bin
# pip would compile all of torch and Ray: a module is compiled when it is first imported, and that is kept
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test pages clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/ready

demo: .venv/ready
	rm -rf runs/demo
	$(BIN)/dualdelay compare 'dude[lr=0.05]' 'vanilla[lr=0.05]' 'sync[lr=1.0]' \
	    --problem 'digits[workers=10,split=label]' --speeds 'truncated_normal[std=5]' \
	    --time 800 --folder runs/demo

test: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m 'not real'
	ATEN_CPU_CAPABILITY=$$($(BIN)/python tests/other_processor.py) $(BIN)/pytest -n 2 --dist worksteal -m numeric
	$(BIN)/pytest -m real

pages: .venv/ready
	for part in $$(grep -l '^if __name__' tests/docs/test_*.py); do PYTHONPATH=tests $(BIN)/python $$part; done
	$(BIN)/ruff format --quiet docs

clean:
	rm -rf .venv runs
