# SPDX-License-Identifier: Apache-2.0
# Everything happens in .venv and this folder, but for Debian packages that are missing: they are
# installed where root runs this, and named otherwise (tools/packages).
#   make demo    train a classifier on real data with 2 workers and 2 servers, over sockets
#   make test    the whole test suite, style and types included
#   make test-frameworks   the plugins, each with its framework in .venvs/
#   make bench   measure against the alternatives
#   make wheel   manylinux wheels for every Python that is here, and the source archive, in dist/
#   make release   the same and the packages' list, all checked; refuses what is not in CHANGELOG.md
#   make wheel-aarch64   a wheel for Python 3.11 on aarch64, cross-built, tried in an emulator
#   make sbom    the packages that 'pip install fastps' brings, as CycloneDX in out/sbom.json
#   make docs    the site, in out/site; broken links are errors
#   make soak    half an hour under the sanitizers, an hour of fuzzers, then a million names
#   make mutate  make 200 one-line mistakes, one at a time; fails where the tests notice too few
#   make chaos   let processes, links, disks and clocks of 100 jobs fail, and check what they do
#   make churn   let workers of one job come and go for five minutes, and check what they trained
#   make first-day   play a newcomer's first day in clean Debians; installs debootstrap as root
#   make clean   remove what was built; make distclean also removes .venv and .venvs
# PYTHON=... chooses the interpreter, PIP_FLAGS=... is handed to every pip install.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_FLAGS ?=
JOBS ?= $(shell nproc)
RUN := .venv/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
SOURCES := $(shell find fastps tests/aids -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi') setup.py
METADATA := setup.cfg pyproject.toml

FRAMEWORKS := $(basename $(notdir $(wildcard tests/frameworks/matrix/*.txt)))

# Tests start thousands of processes, which are not to compile every module anew, as some images say.
unexport PYTHONDONTWRITEBYTECODE

STAMP := build/.packages

.PHONY: all packages demo test test-frameworks check unit bench wheel sbom docs soak mutate chaos churn first-day release wheel-aarch64 build clean distclean
.DELETE_ON_ERROR:
.PRECIOUS: .venvs/%/.made

all: build

demo: .venv/.demo
	.venv/bin/fastps-run -np 2 -s 2 --env FASTPS_SHARED_MEMORY=0 $(RUN) examples/train_digits.py --verify

# The house tests among them run tools/check: style, types, stubs, spelling. Many tests wait most of
# the time, so several run at once; then those that measure, build or have virtual machines, alone.
# Exit code 5 says that PYTEST_FLAGS choose none of them.
test: .venv/.test
	@status=0; set -x; \
	$(RUN) -m pytest -n $$(($(JOBS) + 1)) --dist loadfile --no-loadscope-reorder -m "not alone" $(PYTEST_FLAGS) || status=$$?; \
	$(RUN) -m pytest -m alone $(PYTEST_FLAGS) || test $$? = 5 || status=1; \
	test $$status = 0 -o $$status = 5

# Each framework has an environment of its own, of the versions in its file, and sees this folder.
test-frameworks: .venv/.built
	@$(MAKE) --no-print-directory --keep-going --output-sync --jobs=$(JOBS) \
		$(FRAMEWORKS:%=test-framework-%)

test-framework-%: .venvs/%/.made
	.venvs/$*/bin/python -m pytest tests/frameworks/test_$**.py tests/house/test_docs.py \
		-k "test_$* or $*.md" $(PYTEST_FLAGS)

.venvs/%/.made: tests/frameworks/matrix/%.txt .venv/.built
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) -r $<
	echo "$(CURDIR)" > "$$(.venvs/$*/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/fastps.pth"
	@touch $@

check: .venv/.test
	tools/check ruff format mypy pyright stubs cython spelling

unit: .venv/.test
	$(RUN) -m pytest tests/unit tests/house

# Tables on the terminal, and the same as JSON lines in out/.
bench: .venv/.demo
	@mkdir -p out
	$(RUN) tools/bench/queue_hop.py --json out/queue.jsonl
	$(RUN) tools/bench/kernels.py --json out/kernels.jsonl
	$(RUN) tools/bench/push_pull.py --json out/push_pull.jsonl
	$(RUN) tools/bench/peers/run.py --json out/peers.jsonl
	$(RUN) tools/bench/train_torch.py --json out/train_torch.jsonl

# Tools with environments of their own, beside those of the frameworks.
wheel: .venvs/wheel/.made
	PIP_FLAGS="$(PIP_FLAGS)" .venvs/wheel/bin/python tools/wheels.py

# Its workers run in qemu, and fastps-run here.
wheel-aarch64: .venv/.test
	PIP_FLAGS="$(PIP_FLAGS)" $(RUN) tools/aarch64.py

# Uploads nothing. Says first what is missing, since the wheels take minutes.
release: .venvs/release/.made
	@$(PYTHON) tools/release.py ready
	rm -rf dist
	@$(MAKE) --no-print-directory wheel sbom
	PIP_FLAGS="$(PIP_FLAGS)" .venvs/release/bin/python tools/release.py check

# Nothing is compiled: the package itself counts by its name and version.
INSTALLED := .venvs/installed
sbom: .venvs/sbom/.made
	$(PYTHON) -m venv --clear --without-pip $(INSTALLED)
	FASTPS_ONLY=nothing .venvs/sbom/bin/python -m pip --disable-pip-version-check \
		--python $(INSTALLED) install --quiet $(PIP_FLAGS) .
	@mkdir -p out
	.venvs/sbom/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
		--output-file out/sbom.json $(INSTALLED)/bin/python

docs: .venvs/docs/.made
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --strict --quiet --site-dir out/site

.venvs/wheel/.made .venvs/release/.made .venvs/sbom/.made .venvs/docs/.made: .venvs/%/.made: $(METADATA)
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS) $$($(PYTHON) -c \
		'import configparser as c; f = c.ConfigParser(); f.read("setup.cfg"); \
		print(*f["options.extras_require"]["$*"].split())')
	@touch $@

# What has been run stands in the log, so that this continues where it was stopped.
SEED ?= 1
mutate: .venv/.test
	$(RUN) tools/mutate.py --seed $(SEED) --jobs $(JOBS) --log out/mutate-$(SEED).jsonl $(MUTATE_FLAGS)

# Exits with 1 if there are findings. LAYOUTS=memory,apart chooses; --help lists what can happen.
# ELASTIC=1 makes all jobs elastic, of 1 worker at least.
EVENTS ?= 100
LAYOUTS ?=
ELASTIC ?=
chaos: .venv/.test
	$(RUN) -m tools.chaos --seed $(SEED) --events $(EVENTS) --layouts "$(LAYOUTS)" \
		$(if $(ELASTIC),--elastic $(ELASTIC)) $(CHAOS_FLAGS)

SECONDS ?= 300

churn: .venv/.test
	$(RUN) -m tools.churn --seed $(SEED) --seconds $(SECONDS) $(CHURN_FLAGS)

# FIRST_DAY_FLAGS="--room trixie --only ssh" plays a part; --help lists the flags.
first-day: wheel .venv/.built
	@command -v debootstrap >/dev/null || { apt-get update -qq; apt-get install -y -qq debootstrap gpgv; }
	$(RUN) -m tools.firstday $(FIRST_DAY_FLAGS)

# Fails on the first report of a sanitizer; tools/sanitize says what is run.
soak: .venv/.test
	tools/sanitize address
	tools/sanitize undefined
	tools/sanitize thread
	FUZZ_SECONDS=1800 $(RUN) -m pytest -s tests/fuzz
	FUZZ_SECONDS=900 tools/sanitize address tests/fuzz
	FUZZ_SECONDS=900 tools/sanitize undefined tests/fuzz
	$(RUN) -m pytest -s tests/soak/soak_*.py
	FASTPS_MIXED_EXAMPLES=3000 $(RUN) -m pytest tests/cluster/test_mixed.py

build: .venv/.built

# The stamp is newer than what was built only where the build would find other headers now.
packages:
	@tools/packages "$(PYTHON)" $(STAMP)

$(STAMP): packages ;

.venv/.made: | $(STAMP)
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed'; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.tools: .venv/.made pyproject.toml
	$(PIP) $$($(RUN) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))\
	["build-system"]["requires"])')
	@touch $@

# The extensions stand beside their sources, so that edits need no new installation.
.venv/.built: .venv/.tools $(SOURCES) $(STAMP)
	$(RUN) setup.py --quiet build_ext --inplace --parallel $(JOBS)
	@touch $@

.venv/.demo: .venv/.built $(METADATA)
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

# What pip would compile with one processor; some of it is for other versions of Python.
.venv/.test: .venv/.built $(METADATA)
	$(PIP) --no-compile --no-build-isolation --editable '.[demo,test]'
	@$(RUN) -m compileall -qq -j $(JOBS) .venv/lib || true
	@touch $@ .venv/.demo

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find fastps tests tools examples -name __pycache__ -prune -exec rm -rf {} +
	find fastps tests/aids \( -name '*.so' -o -name '*.c' \) -delete
	rm -f .venv/.built

distclean: clean
	rm -rf .venv .venvs
