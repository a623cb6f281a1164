# All that a fresh machine with make and Python 3.11 or newer needs; `make help` lists it.

VENV := .venv
PY = $(VENV)/bin/python
PYTHON := # builds the environment; where empty, the newest of PYTHONS that runs
PYTHONS = $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
UV := $(shell uv --version >/dev/null 2>&1 && echo uv)
CUDA = $(shell if $(has_gpu); then [ "$$($(driver))" -ge 13 ] 2>/dev/null && echo cuda13 || echo cuda12; fi)
WORKERS = $(shell if $(has_gpu); then echo 0; else echo 2; fi) # processes; a GPU is not shared
TORCH := torch==2.13.0
# The references run on the CPU: its build of PyTorch is a tenth of the size.
TORCH_BUILD := $(if $(filter Darwin,$(shell uname)),,+cpu)

export UV_PYTHON_DOWNLOADS := never
export PIP_DISABLE_PIP_VERSION_CHECK := 1

has_gpu = nvidia-smi -L 2>/dev/null | grep -q '^GPU'
driver = nvidia-smi | sed -n 's/.*CUDA[A-Z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1
# A candidate may be too old, unable to make environments, or a name that only fails.
probe = import sys, venv $(if $(UV),,, ensurepip); sys.version_info < (3, 11) and sys.exit(1); print(sys.executable)
comma := ,
space := $() $()
# $(call project,a b) is -e '.[a,b]'
project = -e '.$(addprefix [,$(addsuffix ],$(subst $(space),$(comma),$(strip $(1)))))'
# Python compiles modules as they are imported; pip would compile all of them, half of an install.
PIP = $(PY) -m pip install --quiet --no-compile
# pip follows settings of its own, so what uv cannot find it may.
install = $(if $(UV),$(UV) pip install --quiet --python $(PY) $(1) ||) $(PIP) $(1)

.PHONY: help demo test lint dev clean

help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile
	@echo 'With ARGS="..." (demo), PYTEST_ARGS="..." (test; -m "" for all), PYTHON=python3.12, VENV=folder,'
	@echo 'CUDA=cuda12, cuda13 or nothing, UV= (use pip), TORCH=torch==version.'

demo: $(VENV)/.base ## writes text with the model that comes along
	@$(PY) -m jaxrunner $(ARGS)

test: $(VENV)/.dev $(VENV)/.references ## runs the tests, but for slow ones
	@$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/.dev ## checks style, format and types
	@status=0; \
	$(PY) -m ruff check . || status=1; \
	$(PY) -m ruff format --check . || status=1; \
	if command -v node >/dev/null && $(PY) -m pyright --version >/dev/null 2>&1; \
	then $(PY) -m pyright --pythonpath $(PY) || status=1; \
	else echo "Types are not checked: pyright needs node and a download."; fi; \
	exit $$status

dev: $(VENV)/.dev ## makes the environment for work on jaxrunner

clean: ## removes what make made, environments too
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.base: pyproject.toml
	@$(PY) -c '' 2>/dev/null || { \
	  if [ -e $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
	    echo "VENV=$(VENV) is there and is no Python environment: name another folder." >&2; exit 1; \
	  fi; \
	  for name in $(PYTHONS); do \
	    found=$$($$name -c '$(probe)' 2>/dev/null) && break; found=; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "None of $(PYTHONS) is a Python of at least 3.11 with venv (Debian and Ubuntu:" \
	      "apt install python3-venv). Name one: make PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$found"; \
	  rm -rf $(VENV); \
	  $(if $(UV),$(UV) venv --quiet --seed --python $$found $(VENV) ||) $$found -m venv $(VENV); }
	@echo "Installing jaxrunner$(if $(CUDA), for $(CUDA): 3.5 GB to download,: 0.2 GB to download)"
	@$(call install,$(call project,$(CUDA)))
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing what tests and checks need"
	@$(call install,$(call project,$(CUDA) dev))
	@touch $@

# Not made where PyTorch cannot be had, so that the next run tries again. What needs PyTorch comes
# after it, as it would fetch another build: accelerate, of lm-eval's Hugging Face backend, and the
# references of adapters and of quantised weights.
$(VENV)/.references: $(VENV)/.dev
	@$(PY) -c 'import torch, transformers' 2>/dev/null || { \
	  echo "Installing the references: transformers, $(TORCH) for the CPU"; \
	  $(call install,'transformers>=5') || true; \
	  $(PIP) '$(TORCH)$(TORCH_BUILD)' 2>/dev/null \
	    $(if $(UV),|| $(UV) pip install --quiet --python $(PY) --torch-backend=cpu '$(TORCH)' 2>/dev/null) || true; }
	@echo "Installing lm-eval, and what runs the notebooks"
	@$(call install,$(call project,$(CUDA) dev eval notebook))
	@if $(PY) -c 'import torch, transformers' 2>/dev/null; \
	then $(call install,accelerate) || true; $(call install,$(call project,$(CUDA) hf)) || true; touch $@; else \
	  echo "PyTorch for the CPU cannot be installed here: tests against transformers WILL BE SKIPPED."; \
	  echo "To run them: $(PY) -m pip install torch transformers"; fi
