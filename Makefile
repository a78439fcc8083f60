# Every target works on a bare clone: the first run makes a virtual environment, later ones only check a stamp.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
# The oldest Transformers that is supported, for `make test-matrix`.
OLDEST ?= 5.17.0
BIN     = $(VENV)/bin
JOBS   ?= 2

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test test-matrix test-soak test-vllm test-gpu lint format examples clean

help:
	@echo "make demo         install what the demo needs and run it on the demo model"
	@echo "make test         the tests of everyday work (under 15 minutes on 2 cores)"
	@echo "make lint         ruff and mypy"
	@echo "make examples     run every script in examples/"
	@echo "make test-matrix  every model family in both dtypes, on the newest and the oldest Transformers"
	@echo "make test-soak    long runs: fuzzing, bursts, memory"
	@echo "make test-vllm    our router in front of two unmodified vLLM workers (installs vLLM beside our environment)"
	@echo "make test-gpu     what needs a CUDA device (uses the installed torch, installs nothing)"

# torch first and pinned: an open range would fetch the newest CUDA build, gigabytes of it.
$(VENV)/.installed-demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch==$(TORCH)"
	$(BIN)/pip install --quiet -e ".[plot,serve]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	$(BIN)/pip install --quiet -e ".[dev]"
	# TGI's client pins an old huggingface-hub that it does not need.
	$(BIN)/pip install --quiet --no-deps "text-generation==0.7.0"
	@touch $@

$(VENV)-oldest/.installed: pyproject.toml
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --upgrade pip
	$(VENV)-oldest/bin/pip install --quiet "torch==$(TORCH)" "transformers==$(OLDEST)"
	$(VENV)-oldest/bin/pip install --quiet -e ".[dev]" "transformers==$(OLDEST)"
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/moe-opt demo $(STAGE)

EVERYDAY = not matrix and not soak and not gpu and not vllm

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "$(EVERYDAY)" $(ARGS)

test-matrix test-soak: export MOE_OPT_HYPOTHESIS ?= explore
test-matrix: $(VENV)/.installed-dev $(VENV)-oldest/.installed
	$(BIN)/python -m pytest -q -n $(JOBS) -m matrix $(ARGS)
	$(VENV)-oldest/bin/python -m pytest -q -n $(JOBS) -m "matrix or ($(EVERYDAY))" tests/modeling $(ARGS)

test-soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -m soak --timeout 3600 $(ARGS)

# vLLM pins another Transformers: it gets an environment of its own, and its workers run from there.
$(VENV)-vllm/.installed: scripts/install_vllm.sh
	scripts/install_vllm.sh $(VENV)-vllm
	@touch $@

test-vllm: $(VENV)/.installed-dev $(VENV)-vllm/.installed
	MOE_OPT_VLLM=$(abspath $(VENV)-vllm)/bin/vllm $(BIN)/python -m pytest -q -m vllm tests/vllm $(ARGS)

test-gpu:
	PYTHONPATH=src python3 -m pytest -q -m gpu -p no:cacheprovider $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

examples: $(VENV)/.installed-dev
	@set -e; for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-vllm out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
