# `make demo` and `make test` install everything they need into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEVICE := $(VENV)/.device
# What is imported is compiled then, if nobody forbids it; most of what comes with torch never is. And matplotlib lists
# fonts by a process, once.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile
TORCH ?= torch==2.13.0
# Where torch's authors publish builds for CPUs; what the default index has may bring gigabytes of CUDA along. It is
# asked first on machines without a GPU's driver.
TORCH_CPU_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)

export OMP_NUM_THREADS := 1
# An own folder: a compiler killed half-way leaves a lock that hangs every later start.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export DS_ACCELERATOR ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)

export BAMBOO_TEST_FORK := $(or $(FORK),1)

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder
RECIPES := $(VENV)/recipes
TRANSFORMERS := $(VENV)/transformers
CHECKERS := skypilot==0.14.1 helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 \
  cloudcoil.models.prometheus_operator==0.80.1.0

.PHONY: install test test-times lint unit exhaustive real docs demo benchmarks clean

install: $(STAMP)

$(STAMP): setup.py Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(shell command -v nvidia-smi 2>/dev/null),--system-site-packages) $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	$(BIN)/python -c "import torch" 2>/dev/null \
	  || $(PIP) --retries 0 --timeout 10 $(addprefix --index-url ,$(TORCH_CPU_INDEX)) \
	       "$(TORCH)" 2>/dev/null \
	  || { echo "no $(TORCH) from $(or $(TORCH_CPU_INDEX),there): taking what pip's own index has"; \
	       $(PIP) "$(TORCH)"; }
	$(BIN)/python -c "import torch; print('torch', torch.__version__, 'for CUDA', torch.version.cuda)"
	$(PIP) --no-build-isolation --editable ".[embedded,benchmarks,dev]"
	$(BIN)/python -c "import torch._dynamo, deepspeed.pipe, matplotlib.font_manager" >/dev/null
	touch $(STAMP)

# One after the other: what tests wait for is longer beside type checks.
test: install
	$(MAKE) --no-print-directory unit
	$(MAKE) --no-print-directory lint

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Jobs of workers wait a good part of their time: four at once keep two processors busy. FORK=0 executes every process
# of a job, as users' are, instead of forking it from one that has made its imports.
unit: $(DEVICE)
	$(PYTEST)

# The device of tests, so that no test waits for a compiler.
$(DEVICE): $(STAMP) tests/support/far_device.cpp
	$(if $(shell command -v c++),$(BIN)/python -m tests.support.far_device)
	touch $@

# Where the time goes, by file and by cause. Keeps how long each test took, which `unit` begins the longest first by.
test-times: $(DEVICE)
	BAMBOO_TEST_TIMES=1 $(PYTEST) --durations=50

# What `unit` leaves out: long jobs, other points of matrices, other forms of the same jobs, the demo. Then all jobs that reduce
# over members, on the work-alike of NCCL, and on the device of tests if there is a compiler for it.
exhaustive: $(DEVICE)
	$(PYTEST) -m exhaustive
	BAMBOO_TEST_NCCL=1 $(if $(shell command -v c++),BAMBOO_TEST_FAR_DEVICE=1) $(PYTEST) -m "not real" \
	  --ignore tests/job/test_on_nccl.py --ignore tests/job/test_far_device.py --ignore tests/job/test_parked.py

# Jobs on the tools that users have, as Debian has them, with real hosts that are lost. Needs root, and
# apt-get install iproute2 openssh-server pdsh slurm-wlm munge etcd-server etcd-client openssl systemd prometheus
# The page's tests also need chromium, chromium-driver and the extra [browser], and are skipped without them.
real: install $(RECIPES)/.installed $(TRANSFORMERS)/.installed
	$(BIN)/python -m pytest -m real tests/real

# What checks the recipes for clusters, apart from what they are checked with: SkyPilot alone brings a hundred packages.
$(RECIPES)/.installed: Makefile
	test -x $(RECIPES)/bin/python || $(PYTHON) -m venv $(RECIPES)
	$(RECIPES)/bin/python -m pip install --quiet --no-compile $(CHECKERS)
	touch $@

# A folder that a script adds to its path, after .venv's own packages.
$(TRANSFORMERS)/.installed: Makefile
	rm -rf $(TRANSFORMERS)
	$(BIN)/python -m pip install --quiet --no-compile --target $(TRANSFORMERS) transformers==4.57.6
	touch $@

# Settings and events in docs/ are listed from the code.
docs: install
	$(BIN)/python -m tests.support.docs

demo: install
	$(BIN)/bamboo demo

benchmarks: install
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/memory.py

clean:
	rm -rf $(VENV) build dist *.egg-info out
