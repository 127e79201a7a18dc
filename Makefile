# `make` lists the targets. Every target sets up what it needs first; a second run finds it done.
#
#   ROOM=...     `make test` of one folder below tests/, such as kv, scheduling, engine or schedulers
#   HOURS=...    time for the measured points of `make artifact`
#   REHEARSE=1   `make artifact` on the CPU with tiny models
#   ARGS="..."   further arguments of the command behind the target
#   PYTHON=...   the Python to build the virtual environment from
#   VENV=        no virtual environment: use PYTHON (or python3) and its packages as they are

VENV ?= .venv
RUN := $(if $(VENV),$(VENV)/bin/python,$(or $(PYTHON),python3))
export VENV PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup fig5 validate artifact test lint docs

help:   ## list the targets
	@sed -n 's/^\([a-z0-9]*\): .*##/  make \1\t/p' $(MAKEFILE_LIST)

setup:  ## virtual environment, packages, ISPC, native build, model
	@scripts/setup.sh

fig5: setup  ## replay the traces under swiftllm, neo, apex and adaptive, and draw Figure 5
	$(RUN) evaluation/reproduce_fig5.py $(ARGS)

validate: setup  ## predict real runs of vLLM from operator tables: measured beside simulated, term by term
	$(RUN) evaluation/validate.py --terms --run rtx4090-llama-3.1-8b rtxpro6000-llama-3.1-8b \
		rtxpro6000-qwen3-30b-a3b $(ARGS)

artifact: setup  ## run all figures that apply to this machine and write the report: HOURS=8, REHEARSE=1 on tiny models
	$(RUN) evaluation/artifact.py --hours $(or $(HOURS),8) $(if $(REHEARSE),--rehearse) $(ARGS)

lint: setup  ## check style and types: ruff and pyright (about a minute)
	$(RUN) scripts/lint.py

docs: setup  ## build the site of the documents into build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)
	@echo "open build/site/index.html"

# A room is a folder of tests, two levels deep at most; `make test` without one runs all, after the
# linters where these are installed.
ROOM_FOLDERS := $(sort $(dir $(wildcard tests/*/test_*.py tests/*/*/test_*.py)))
TESTED := $(filter %/$(ROOM)/,$(ROOM_FOLDERS))
ifneq ($(ROOM),)
ifeq ($(TESTED),)
$(error there is no room $(ROOM): there are $(sort $(notdir $(ROOM_FOLDERS:/=))))
endif
endif

# A small room ends before two processes have imported what they need.
PROCESSES := $(if $(ROOM),,-n 2 --dist worksteal)

# One torch thread: more threads on a busy machine are ten times slower, not faster. What is imported first is compiled
# and kept, as pip compiled nothing.
test: $(if $(ROOM),setup,$(if $(VENV),lint,setup))  ## lint, then run the tests; ROOM=kv runs those of a room; ARGS=--all-cases every case
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest $(PROCESSES) $(TESTED) $(ARGS)
