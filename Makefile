PYTHON ?= python3
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test bench reproduce tutorials docs lint build alone clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo 'ARGS="..." is passed on by demo, test, bench, reproduce and tutorials, for example: make test ARGS="-k cg"'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,experiments,docs]'
	touch $@

demo: $(INSTALLED)  ## run every experiment in its quick preset
	$(BIN)/python -m experiments --preset quick $(ARGS)

# One thread for each test process: with more, the processes compete for the same cores.
test: $(INSTALLED)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

bench: $(INSTALLED)  ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

reproduce: $(INSTALLED)  ## run every experiment as in the paper
	$(BIN)/python -m experiments --preset paper $(ARGS)

tutorials: $(INSTALLED)  ## run the tutorials and write their pages and notebooks into docs/tutorials
	OMP_NUM_THREADS=1 $(BIN)/python -m tutorials $(ARGS)

docs: $(INSTALLED)  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

lint: $(INSTALLED)  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

build: $(INSTALLED)  ## build the sdist and the wheel into dist/
	$(BIN)/python -m build

# In a folder of its own, so that nothing of the clone is imported.
alone: build  ## install the wheel and the sdist, each alone in a fresh environment, and try them there
	for file in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
		place=$$(mktemp -d) && \
		$(PYTHON) -m venv $$place/venv && \
		$$place/venv/bin/pip install --quiet --constraint constraints.txt $$file && \
		sed -n '/^```python/,/^```/p' README.md | sed '/^```/d' > $$place/readme.py && \
		(cd $$place && venv/bin/python -W error -m torchdil && venv/bin/python -W error readme.py) && \
		rm -r $$place || exit 1; \
	done

clean:  ## remove build outputs and caches; .venv and results/ stay
	rm -rf dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
