# The commands of the project; `make` alone lists them. GNU make 3.81 and a POSIX shell suffice.

# --- variables ---------------------------------------------------------------------------------
#: Python to build .venv on (default: the one it has, or the first of python3, 3.13, 3.12, 3.11 that will do)
PYTHON_BIN ?=
#: Package index that torch alone comes from; see below
TORCH_INDEX ?=
#: Training processes of `make demo`
WORKERS ?= 2
#: Damaged forms of each sample of `make fuzz`
EXAMPLES ?= 2000
#: More arguments for pytest or cdk: make test ARGS="-k checkpoints -x"
ARGS ?=
#: 1: `make deploy` and `make destroy` do not ask
YES ?=

# On Linux the default index has torch with CUDA, several GB of it. PyTorch's own page "Start
# Locally" shows, for the compute platform CPU, an address after --index-url: give that as
# TORCH_INDEX once, .venv remembers it. macOS needs none, its torch has no CUDA.
export PYTHON_BIN TORCH_INDEX

# Packages come without bytecode: a first run compiles what it imports, a quarter of all there is,
# and should keep it.
unexport PYTHONDONTWRITEBYTECODE

# CDK's command line reports nothing.
export CDK_DISABLE_CLI_TELEMETRY := true

PYTHON := .venv/bin/python
NODE := -r requirements/training.txt
LAPTOP := -r requirements/laptop.txt
DEV := -r requirements.txt -r requirements/dev.txt
# pip: for you, in an active shell.
VENV := sh .ci/venv .venv -c requirements.lock -e . pip
CDK := node_modules/.bin/cdk
# The CDK's own words name no way out, where there is no account above all.
DOCTOR := || { echo 'trainctl doctor checks the account; make synth needs none' >&2; exit 1; }
# Tests with these markers, in three processes, which keep two processors busy: tests often wait. Each
# takes whole files, whose tests share what is slow to make, the longest ones first.
parallel = $(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(call marked,$(1))
marked = -m "$(1)"
# One process, because they share one deployment. A test keeps them in this folder.
in_containers = $(PYTHON) -m pytest tests/rehearsal
# Results of `make night`.
NIGHT := build/night.md
# Where CI is set, there is no one to ask.
UNASKED := $(strip $(YES)$(CI))

.DEFAULT_GOAL := help
# Two targets at once would install into the same .venv.
.NOTPARALLEL:
.PHONY: help demo local rehearse canary pictures docs synth diff deploy images destroy test test-engine test-fast test-slow check night format fuzz bench lock clean distclean venv venv-dev venv-laptop venv-aws venv-docs venv-audit node

##@ Use it
demo: venv ## train on real images with $(WORKERS) processes on this machine, and write the report
	@$(PYTHON) -m training.launch ddp --local --workers $(WORKERS) --preset digits --run demo --overwrite
	@printf '%s\n' '' 'Next:' \
		'  open the report     runs/demo/report.html' \
		'  your own pictures   DIR, with a folder of pictures for each class:' \
		'    .venv/bin/trainctl run imagenet --preset small --image-size 64 --epochs 10 --run mine --data DIR' \
		'  a job on AWS        docs/tutorials/first-hour.md' \
		'  your own script     docs/tutorials/your-script.md'

local: venv-laptop venv-aws node ## a local AWS with the stacks, which stays up (needs a Docker Engine)
	@$(PYTHON) -m trainctl local up

deploy: venv-laptop node ## both stacks, to the account in use: ARGS="-c preset=fsdp -c max_workers=4"
	@$(CDK) deploy CoreStack TrainingStack $(if $(UNASKED),--require-approval never) $(ARGS) $(DOCTOR)

images: venv-laptop ## build both images, try them out, push them to the deployed repositories
	@TORCH_INDEX="$${TORCH_INDEX:-$$(cat .venv/torch-index 2>/dev/null)}" $(PYTHON) -m containers.publish $(ARGS)

destroy: venv-laptop node ## remove both stacks, running hosts too; the bucket stays unless told
	@$(CDK) destroy TrainingStack CoreStack $(if $(UNASKED),--force) $(ARGS) $(DOCTOR)

##@ More
rehearse: venv venv-laptop venv-aws node ## the whole system in containers on a local AWS (needs a Docker Engine)
	@$(PYTHON) -m rehearsal all

canary: venv-laptop node ## first in a new account: deploy, jobs, remove (at most $3; ARGS=--gpu: $5)
	@$(PYTHON) -m rehearsal canary $(if $(UNASKED),--yes) $(ARGS)

bench: venv-dev ## measure again what benchmarks/results has for docs/benchmarks.md
	@set -e; for name in ddp checkpoint; do \
		$(PYTHON) -m benchmarks.$$name > benchmarks/results/$$name.new; \
		mv benchmarks/results/$$name.new benchmarks/results/$$name.json; \
	done

synth: venv-laptop node ## write the templates to cdk.out; needs no account and no network
	@$(CDK) synth --quiet $(ARGS)

diff: venv-laptop node ## what `make deploy` would change, and whether it needs a destroy first
	@$(CDK) diff $(ARGS) $(DOCTOR)
	@$(PYTHON) -m trainctl.setup.updates

##@ Work on it
check: venv-dev venv-aws node ## lint, format, types, rules of the templates and the quick tests
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache
	@sh .ci/beside '$(PYTHON) -m mypy' '$(call parallel,not slow and not night) -q'

test: venv-dev venv-aws venv-docs node ## all tests but the longest and those in containers (minutes)
	$(call parallel,not engine and not night and not long) $(ARGS)

# What `make check` leaves out of CI's tests, in two halves.
test-slow: venv-dev venv-aws venv-docs node ## the slow tests that need no Docker Engine
	$(call parallel,slow and not engine and not night) $(ARGS)

test-engine: venv-dev venv-aws node ## the tests in containers
	$(in_containers) $(call marked,engine and not night) $(ARGS)

night: venv-dev venv-aws venv-audit node ## the tests CI leaves out: rare models, audits, soaks, browsers (hours)
	@mkdir -p $(dir $(NIGHT))
	@printf '| tests of | tests | passed | failed | seconds |\n| --- | ---: | ---: | ---: | ---: |\n' >$(NIGHT)
	@# A part that fails keeps no other from running. 5: none of its tests was asked for.
	@code=0; set -x; \
	$(call parallel,night and not engine) --table=$(NIGHT) $(ARGS) || [ $$? -eq 5 ] || code=1; \
	$(in_containers) $(call marked,engine and night) --table=$(NIGHT) $(ARGS) || [ $$? -eq 5 ] || code=1; \
	{ set +x; } 2>/dev/null; cat $(NIGHT); exit $$code

fuzz: venv-dev ## damage what others may have written, EXAMPLES of each
	FUZZ_EXAMPLES=$(EXAMPLES) $(PYTHON) -m pytest -q --timeout 3600 tests/test_untrusted.py $(ARGS)

simulate: venv-dev venv-aws node ## lives of jobs in a simulated account: LIVES=30000 FIRST_LIFE=0
	LIVES=$(or $(LIVES),30000) $(PYTHON) -m pytest -q -s --timeout 3600 $(call marked,not night) tests/stacks/test_lives.py $(ARGS)

test-fast: venv-dev venv-aws node ## the quick tests
	$(call parallel,not slow and not night) $(ARGS)

format: venv-dev ## rewrite the sources as `check` wants them
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

pictures: venv-dev ## redraw docs/images from today's code, on an idle machine
	@$(PYTHON) .ci/pictures.py

docs: venv-docs ## the documentation as a site with search, in build/site
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --config-file .ci/mkdocs.yml

##@ Keep house
# Hashes of all but torch and torchvision, which come in several builds by their index. One for CUDA
# pins its CUDA packages itself, and the others have no use for them. On the oldest Python: what it
# admits, the newer ones admit too.
LOCKED = awk '/^[^ ]/ { drop = /^((nvidia|cuda)-|triton=|torch(vision)?=)/ } /^torch(vision)?=/ { sub(/[+ ].*/, ""); print } !drop'
lock: ## resolve the requirement files into requirements.lock (UPGRADE=1: newest of the rest)
	@sh .ci/uv --version && cp requirements.lock .uv
	@sh .ci/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --python-version 3.11 --generate-hashes \
		--no-annotate --custom-compile-command "make lock" --output-file .uv/requirements.lock \
		requirements.txt requirements/images.txt requirements/dev.txt
	@$(LOCKED) .uv/requirements.lock > requirements.lock

clean: ## remove caches and what builds leave behind; runs/ and the environments stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis cdk.out .rehearsal \
		build/site build/night.md ecs_train.egg-info
	find contract store training trainctl stacks containers benchmarks rehearsal tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments that make has made, too
	rm -rf .uv node_modules
	@for dir in .venv .venv-aws .venv-docs .venv-audit; do \
		if [ -f $$dir/install.log ] && [ ! -f $$dir/adopted ]; then rm -rf $$dir; fi; done

venv: ## .venv with what training needs (other targets do this by themselves)
	@$(VENV) $(NODE)

venv-dev:
	@$(VENV) $(DEV)

venv-laptop:
	@$(VENV) $(LAPTOP)

venv-aws:
	@TORCH_INDEX= sh .ci/venv .venv-aws -r rehearsal/requirements.txt

venv-docs:
	@TORCH_INDEX= sh .ci/venv .venv-docs -r .ci/docs-requirements.txt

venv-audit:
	@TORCH_INDEX= sh .ci/venv .venv-audit -r .ci/audit-requirements.txt

node:
	@sh .ci/node

help: ## this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { gsub(/\$$\(WORKERS\)/, "$(WORKERS)", $$2); printf "  make %-11s %s\n", $$1, $$2 } \
		/^#: / { text = substr($$0, 4) } \
		/^[A-Z_]+ \?=/ { split($$0, half, " [?]= *"); \
			shown = shown sprintf("  %-12s %s%s\n", half[1], text, half[2] == "" ? "" : " [" half[2] "]") } \
		END { printf "\nVariables: make TARGET NAME=value\n%s", shown; \
			printf "\nLinux without an NVIDIA GPU: torch comes with several GB of CUDA unless TORCH_INDEX names\n"; \
			printf "the index that the page \"Start Locally\" of PyTorch shows for the compute platform CPU.\n" }' Makefile
