# One command per chore; `make help` lists them.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
PROTOS := proto/varuna_proto/v1/agent.proto proto/varuna_proto/v1/worker.proto proto/varuna_proto/v1/identity.proto

CHROMIUM := chromium chromium-browser google-chrome
PYTEST = $(BIN)/pytest --dist loadgroup
# Images of containers often set it; here each of some thousand processes would then compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv tests-compiled hooks chromium compiler kubectl slurm helpers demo unit check test test-slow flakes soak soak-matrix soak-zoo soak-kills soak-slow soak-long-steps soak-fleets soak-failpoints soak-traces soak-goodput soak-install gpu lint format proto proto-check docs wheel clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

venv: .venv/.installed ## Set up .venv with everything that users and developers need

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "varuna needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[runtime,manager,azure,ec2,gce,kubernetes,otel,tensorboard,dev]'
	@# What a job imports, and the planner's kernels, are compiled here: once, on two cores, and not by many processes at a time.
	@$(BIN)/python -c 'from varuna_planner.search.auto_config import warm_up; warm_up()' & planner=$$!; \
		$(BIN)/python -c 'import torch.distributed, torch._subclasses.fake_tensor, varuna, varuna_manager.main, varuna_client.cli' && wait $$planner
	@touch $@

tests-compiled: .venv/.tests-compiled

.venv/.tests-compiled: .venv/.installed
	@# pytest rewrites the asserts of each test module: once, on two cores, and not in each of its workers.
	@$(BIN)/pytest --collect-only -qq -n 0 tests/unit >/dev/null 2>&1 & \
		$(BIN)/pytest --collect-only -qq -n 0 --ignore tests/unit >/dev/null 2>&1; wait
	@touch $@

hooks: venv ## Run lint before each commit, by pre-commit
	$(BIN)/pre-commit install

demo: venv ## Train a GPT on four local spot VMs, lose one, gain one, drain one; check every loss
	$(BIN)/varuna demo

chromium: ## Install the browser that the dashboard's tests need, where there is none (as root)
	@command -v $(CHROMIUM) >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "install Chromium with your package manager as root, such as: sudo apt-get install chromium"; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; }

compiler: ## Install the C++ compiler that the simulated accelerator needs, where there is none (as root)
	@command -v g++ >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "install g++ with your package manager as root, such as: sudo apt-get install g++"; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++; }

kubectl: ## Install kubectl, which some tests of the API server of their own need, where there is none (as root)
	@command -v kubectl >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "install kubectl with your package manager as root, such as: sudo apt-get install kubernetes-client"; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends kubernetes-client; }

slurm: ## Install the Slurm that its provider's tests need, where there is none (as root)
	@PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null || { echo "install slurmctld, slurmd, slurm-client and munge with your package manager as root, such as: sudo apt-get install slurmctld slurmd slurm-client munge"; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge; }

helpers: # As root, all of the above; what cannot be installed is left out by the tests that need it, which are named at the end
	@test "$$(id -u)" != 0 || for each in chromium compiler kubectl slurm; do \
		$(MAKE) --no-print-directory $$each || echo "going on without $$each"; done

unit: venv ## Run the quick tests that start no process
	@# File by file: thousands of tests of milliseconds, handed out one by one, take a fifth more CPU.
	$(BIN)/pytest --dist loadfile -n 2 -m "not processes and not long and not slow" tests/unit $(PYTEST_FLAGS)

check: lint unit ## What to run before each commit: lint and unit

test: venv helpers tests-compiled ## Run the tests but the slow ones
	@# Three on two cores: many tests wait for processes.
	$(PYTEST) -n 3 -m "not slow" $(PYTEST_FLAGS)

test-slow: venv helpers tests-compiled ## Run the tests that take long and rarely break
	$(PYTEST) -n 3 -m slow $(PYTEST_FLAGS)

flakes: venv helpers ## Run the tests with processes 50 times beside busy loops (FLAKES="--times 5 tests/e2e")
	$(BIN)/python tests/soak/flakes.py $(FLAKES)

soak: venv ## Train the example under random disturbances for some minutes; check every loss (not part of test)
	$(BIN)/python tests/soak/soak.py $(SOAK)

soak-matrix: venv ## Train all combinations of shape, policy, optimizer, ... and compare each with plain PyTorch (hours)
	$(BIN)/python tests/soak/matrix.py $(SOAK)

soak-zoo: venv ## Cut models as they come from pip into 2, 3 and 4 stages; compare each with the uncut model
	$(BIN)/python tests/soak/zoo.py $(SOAK)

soak-kills: venv ## Kill every rank at every op and phase; every survivor must leave within a second
	$(BIN)/python tests/soak/kills.py $(SOAK)

soak-slow: venv ## Make one of three local VMs slow; it must be found, quarantined and left
	$(BIN)/python tests/soak/slow_vm.py $(SOAK)

soak-fleets: venv ## Play simulated fleets with all that can go wrong, or a recorded spot market (SOAK="--trace")
	$(BIN)/python tests/soak/fleets.py $(SOAK)

soak-failpoints: venv ## Kill manager and agents at every failpoint of a morph, over and over
	$(BIN)/python tests/soak/failpoints.py $(SOAK)

soak-long-steps: venv ## Train with steps of tens of seconds while VMs go and come; check every loss (a quarter of an hour)
	$(BIN)/python tests/soak/long_steps.py $(SOAK)

soak-traces: venv ## Play 10,000 traces of lost, repeated, late messages with each state machine, 500 with all together and of reshapes
	VARUNA_TRACES=10000 VARUNA_FLEET_TRACES=500 $(BIN)/pytest --timeout 0 $(SOAK) \
	    tests/simulation/test_traces_*.py tests/simulation/test_fleet_state_machine.py

soak-goodput: venv ## Play an hour of a spot trace on local VMs in minutes; compare the goodput with the replay's (SOAK="--minutes 20")
	$(BIN)/python benchmarks/goodput_played.py $(SOAK)

soak-install: venv ## Install wheel, manager and a host over ssh from nothing, train there, upgrade (needs a registry, sshd)
	$(BIN)/python tests/soak/install.py $(SOAK)

gpu: venv ## On a machine with GPUs: the tests that need one, then one page of figures (GPU="--size gpt2-2.5b"; docs/gpu.md)
	@$(BIN)/python -c 'from varuna.devices.accelerator import find_accelerator as find; find() or exit("make gpu: torch finds no accelerator here. Install a build of torch for your GPUs: see docs/gpu.md")'
	$(BIN)/pytest -n 0 tests/gpu $(PYTEST_FLAGS)
	$(BIN)/python benchmarks/gpu.py $(GPU)

lint: venv ## ruff, mypy, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks
	@# One by one: the examples are folders of top-level modules with the same names.
	for example in bert gpt hf gradient_checkpointing providers/ray; do \
		MYPYPATH=examples/$$example $(BIN)/mypy --config-file tests/mypy.ini examples/$$example || exit; done
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory proto-check

format: venv ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: venv ## Generate the stubs from the .proto files
	$(BIN)/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=proto --mypy_out=proto --grpc_python_out=proto --mypy_grpc_out=proto $(PROTOS)
	@rm -f proto/varuna_proto/v1/worker_pb2_grpc.py proto/varuna_proto/v1/worker_pb2_grpc.pyi # no service in it

proto-check: proto ## Fail when the checked-in stubs are not what the .proto files give
	@git diff --exit-code --stat -- proto/varuna_proto/v1 || { echo "stubs are stale: run make proto and commit"; exit 1; }

docs: venv ## Write the pages that are made from the code
	$(BIN)/python -m varuna_manager.metrics.exposition > docs/metrics.md
	$(BIN)/python -m varuna_manager.api.http.reference > docs/rest.md
	$(BIN)/python -m varuna_client.reference.cli > docs/cli.md
	$(BIN)/python -m varuna_client.reference.python > docs/python.md
	$(BIN)/python -m varuna_client.reference.job_file > docs/job-file.md
	$(BIN)/varuna validate --schema > docs/job.schema.json
	$(BIN)/python tests/support/migration_page.py

wheel: venv ## Build the wheel that new VMs install from the manager (dist/, with the versions of what it needs)
	rm -f dist/varuna_spot-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	cp constraints.txt dist/

clean: ## Remove what the other commands made
	rm -rf .venv dist demo-out demo-report.json test-artifacts .pytest_cache .mypy_cache .ruff_cache
