PY := .venv/bin/python
CLI := $(PY) -m itercast
BUDGET ?= 5m
PYTHON ?= python3

.PHONY: help setup demo collect campaign train retrain evaluate others bench-public ablate shipped shipped-cpu bench-speed bench-scale dlrm programs predict check ui report test test-slow test-pages docs lint endurance scripts torchrun features laws forecasts clean
PUBLIC ?= ../shared/public-data

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

setup: .venv/.installed ## create .venv and install everything

# Half of what is installed is seldom imported, or never: compiled when it is.
SELDOM = /(tests?|ray|moto|cfnlint|transformers/models|botocore|selenium|matplotlib|fontTools|databricks|pip|mypy|graph_objs)/

.venv/.installed: pyproject.toml constraints.txt
	python3 -m venv .venv
	-.venv/bin/pip install -q --disable-pip-version-check -U pip  # a new one resolves several times as fast
	.venv/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[hf,dev]'
	-.venv/bin/python -m compileall -qq -j 0 -x '$(SELDOM)' .venv/lib  # on all cores, pip would take one
	touch $@

demo: setup ## sweep this CPU, train, forecast, compare: reports/demo
	$(CLI) demo

collect: setup ## sweep kernels (BUDGET=5m)
	$(CLI) collect --device cpu --budget $(BUDGET)

campaign: OUT := runs/gpu
campaign: BUDGET :=
campaign: ## everything on a GPU box, resumable (PART=smoke,ops BUDGET=9m PLAN=unseen FROM=archive POINTS=file PYTHON=python3)
	env -u OUT $(PYTHON) -m itercast.extras.campaign --out $(OUT) $(if $(BUDGET),--budget $(BUDGET)) $(if $(PLAN),--plan $(PLAN)) \
	  $(if $(PART),--part $(PART)) $(if $(FROM),--from $(FROM)) $(if $(POINTS),--points $(POINTS))

train: setup ## train one model per op family on datasets/
	$(CLI) train --data datasets --out bundles/local

retrain: train ## train again, with the rows that have joined datasets/

evaluate: setup ## predicted against measured iterations
	$(CLI) evaluate

OTHERS = $(shell $(PY) -c "from itercast.capture.cases.registry import cases_of; print(*(f'--case {c.name}' for c in cases_of('others')))")
others: setup ## after a demo: 30 models that it does not measure, 20 of them of transformers, forecast and measured on this CPU
	$(CLI) evaluate $(OTHERS) --out reports/others

bench-public: setup ## errors on other people's measurements beside baselines (PUBLIC=folder)
	$(CLI) bench-public $(PUBLIC)

ablate: setup ## what each rule and assumed number buys on other people's measurements (PUBLIC=folder SAMPLE=1)
	$(PY) -m itercast.extras.published.ablation $(PUBLIC) --sample $(or $(SAMPLE),1)

shipped: setup ## rebuild the GPU bundle from public measurements, compare (PUBLIC=folder REPLACE=yes; an hour)
	$(PY) -m itercast.extras.published.fits.shipped $(PUBLIC) $(if $(REPLACE),--replace)

shipped-cpu: setup ## rebuild the CPU bundle from datasets/, compare (REPLACE=yes; 4 minutes)
	$(PY) -m itercast.extras.published.fits.shipped --cpu $(if $(REPLACE),--replace)

dlrm: setup ## recommendation models: lookups, iterations and choice of a sharding on this CPU (15 minutes)
	$(PY) -m itercast.extras.recommenders

programs: setup ## captured programs and plans against measured iterations of several processes (3 minutes)
	$(PY) -m itercast.extras.benchmarks.programs

predict: setup ## forecast one case (CASE=gpt2-small GPU=cpu)
	$(CLI) predict $(or $(CASE),gpt2-small) --gpu $(or $(GPU),cpu)

check: setup ## does the bundle still fit this machine? a minute, exit code 1 if not (DEVICE=cpu BUNDLE=folder)
	$(CLI) check --device $(or $(DEVICE),cpu) $(if $(BUNDLE),--bundle $(BUNDLE))

bench-speed: setup ## how fast predict and price answer (BUNDLE=learners/shipped-cpu)
	$(PY) -m itercast.extras.benchmarks.speed $(or $(BUNDLE),learners/shipped-cpu)

bench-scale: setup ## how forecasts and plan searches of thousands of GPUs scale
	$(PY) -m itercast.extras.benchmarks.scale

ui: setup ## the MLflow UI
	$(CLI) ui

report: setup ## write the report pages anew; runs the demo if it never ran
	@test -f reports/demo/evaluation.json || $(CLI) demo
	$(CLI) report

# Files whose tests take a minute each come first: the others fill what time is left.
LONGEST = tests/extras/fleet/test_driver.py tests/microbench/sweep/test_collect.py
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(PY) -m pytest -n logical --maxprocesses 4 --dist worksteal

test: setup ## run the tests but for the slow ones (7 minutes on 2 cores)
	$(PYTEST) -m "not slow and not pages"

test-slow: setup ## run the slow tests: whole GPU campaigns on a stand-in, real plans and sweeps, learners on published rows (7 minutes)
	$(PYTEST) -m slow $(LONGEST) $$(grep -rl --include='test_*.py' mark.slow tests)

test-pages: setup ## run the long commands that README and the docs show (4 minutes)
	$(PYTEST) -m pages tests/test_code_blocks.py

docs: .venv/.docs ## build the documentation: reports/docs/index.html
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q -d reports/docs && echo reports/docs/index.html

.venv/.docs: .venv/.installed
	.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]' && touch $@

lint: setup ## ruff and mypy
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

endurance: setup ## kill fleets and their sweeps for 10 minutes; read 100,000 hostile files (PUBLIC=folder; an hour)
	$(PY) tests/endurance/kill_fleet.py
	$(PY) tests/endurance/kill_scripts.py
	$(PY) tests/endurance/nccl_logs.py
	PYTHONPATH=. $(PY) tests/endurance/hostile.py $(if $(wildcard $(PUBLIC)),--public $(PUBLIC))

scripts: setup ## forecast unchanged scripts by strangers, those whose packages .venv has (MIRRORS=folder ONLY=name; an hour)
	$(PY) tests/endurance/scripts_of_others.py $(if $(MIRRORS),--mirrors $(MIRRORS)) $(if $(ONLY),--only "$(ONLY)")

torchrun: setup ## 15 small scripts under torchrun on this CPU beside their forecasts (BUNDLE=folder; a quiet machine, 15 minutes)
	$(PY) tests/endurance/scripts_against_torchrun.py $(if $(BUNDLE),--bundle $(BUNDLE))

features: setup ## forecast small programs of one parallel feature each, and what each sends beside what it is by hand (10 minutes)
	$(PY) tests/endurance/parallel_features.py

laws: setup ## hold 500 drawn plans to each law over machines and memory (half an hour)
	$(PY) tests/endurance/laws.py

forecasts: setup ## compare 300 forecasts with those recorded, after code was moved or rewritten (1 minute)
	$(PY) tests/endurance/forecasts.py

clean: ## remove what the targets made, but not datasets
	rm -rf .venv runs reports bundles mlruns mlartifacts mlflow.db .cache
