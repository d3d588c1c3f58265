# Each command sets up what it needs: `make demo`, `make test`, `make docs`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One torch thread a test process: two processes fill two cores. A file goes to one of them, which launches its ranks once.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test test-all test-matrix test-plugs fuzz mutants wheel lint docs format clean

demo: $(VENV)/.installed
	$(BIN)/python -m streamgrad demo

test: $(VENV)/.installed
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile -q -m "not more"

# Also what repeats a proof on more families, seeds and sizes. Two tests of the profile's page drive Chromium, and are skipped
# without it.
test-all: $(VENV)/.installed
	@command -v chromium >/dev/null || echo "Two tests need Chromium. On Debian or Ubuntu: apt-get install chromium"
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile -q

# Every family, every kind of batch and every name of theirs that is used, with the oldest, a middle and the newest release of
# transformers, PEFT and TRL that pyproject.toml allows (.ci/oldest.txt, .ci/middle.txt; the newest are those of the environment).
MATRIX_TESTS := tests/project/test_versions.py tests/project/test_foreign_names.py tests/engine/test_exact_gradients.py \
	tests/hf/test_all_families.py
test-matrix: $(VENV)/.installed
	rm -rf out/matrix
	mkdir -p out/matrix/newest
	for set in oldest middle; do \
		$(BIN)/python -m pip install -q --no-deps --target out/matrix/$$set --requirement .ci/$$set.txt || exit 1; \
	done
	for set in oldest middle newest; do \
		echo "With the $$set releases:"; \
		$(ONE_THREAD) PYTHONPATH=out/matrix/$$set timeout 600 $(BIN)/python -m pytest -n 2 --dist loadfile -q -m "not more" $(MATRIX_TESTS) || exit 1; \
	done

# Frameworks that streamgrad plugs into, each with the versions it was tried with, beside and not in this environment.
TORCHAO_TESTS := tests/hf/test_optimizers.py tests/hf/test_quantized.py tests/engine/test_foreign_tensors.py
test-plugs: $(VENV)/.installed
	for list in tests/integrations/*.txt; do \
		$(BIN)/python -m pip install -q --no-deps --upgrade --target out/plugs/$$(basename $$list .txt) --requirement $$list || exit 1; \
	done
	$(ONE_THREAD) $(BIN)/python -m pytest -q tests/integrations
	$(ONE_THREAD) PYTHONPATH=out/plugs/torchao $(BIN)/python -m pytest -q $(TORCHAO_TESTS)

# Random cases against plain backpropagation, with a program for each that fails: `make fuzz CASES=5000 SEED=7` draws others.
CASES ?= 2000
SEED ?= 0
fuzz: $(VENV)/.installed
	$(ONE_THREAD) PYTHONPATH=tests/support $(BIN)/python -W ignore tests/project/fuzz.py --cases $(CASES) --seed $(SEED)

# Breaks the engine on purpose and shows which proofs notice.
mutants: $(VENV)/.installed
	$(ONE_THREAD) $(BIN)/python tests/project/mutants.py

# The wheel, checked, then installed into an empty environment, from where the command must work.
wheel: $(VENV)/.installed
	rm -rf out/dist out/wheel-env
	$(BIN)/python -m build --outdir out/dist
	$(BIN)/twine check --strict out/dist/*
	$(PYTHON) -m venv out/wheel-env
	out/wheel-env/bin/python -m pip install -q --constraint constraints.txt torch
	out/wheel-env/bin/python -m pip install -q --constraint constraints.txt "$$(ls out/dist/*.whl)[cli]"
	cd out && wheel-env/bin/streamgrad --help >/dev/null
	cd out && wheel-env/bin/streamgrad plan qwen3-8b --seq-len 65536
	cd out && wheel-env/bin/streamgrad demo --quick --out wheel-demo.png

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, into out/site; a broken link fails it.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and by its pin: an open torch requirement would pull another build than the pinned one.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --constraint constraints.txt torch
	$(BIN)/python -m pip install -q --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) out
