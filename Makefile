# make demo    sets itself up and runs the main job, about a minute and a half after set-up
# make test    sets itself up and runs the tests, in nine minutes: all that need no root, and that tests/slow.txt does not call long
# make long    the tests that it calls long, most of which start whole programs
# make check   what every commit passes, in two minutes: ruff, mypy strict, the tests that tests/slow.txt does not list
# make bench   measures what saving costs, beside its peers, an hour and a half on two cores; leaves benchmarks/results/overhead.*
# make loaders installs the data loaders and training loops of others, kills loops over each, and compares
# make bed     kills each loop of check-resume's test bed, with mistakes and without, and writes benchmarks/results/check-resume.md
# make gpu     the tests that need a GPU, then what saving costs on it; says so where there is none
# make lowest  the tests of most libraries' uses, with the oldest versions that pyproject.toml allows; torch's is the newest
# make reference  writes the tables of docs/ and the manual page, which are made of the code, anew
# make docs    builds the site of docs/ into build/docs, with warnings as errors, after writing its generated tables anew
# make system  tests that need root or a real S3 server (.ci/run calls it)
# make lock    writes the hashes of the versions in constraints/, as the package index states them
# make changelog  moves the files of changelog.d into CHANGELOG.md, for the version in pyproject.toml
# make dist    builds a release twice, compares, and signs it: KEY=FILE names the ssh key; UNSIGNED=1 leaves the signature out
# make mutants  makes mutants of each line of tierd/core, and shows which no test of tests/core notices: an hour or more; ONLY=corruption names one module
# make faults  a short round of every kind of fault, as root (needs xfsprogs and strace); make gate: the full one, two hours

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Hundreds of processes load tierd, and each would compile it anew where no bytecode is written.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test long lint check bench gpu loaders loaders/ready bed reference docs docs/ready changelog lowest system mutants faults gate format lock dist clean
.DELETE_ON_ERROR:

# pip checks the hashes of all that one call installs, or of nothing, and a checkout has none: so what is locked comes first,
# then torch (constraints/torch.txt says why it is apart), then tierd. tests/test_supply.py says what the lock lacks.
$(READY): pyproject.toml constraints/development.txt constraints/torch.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierd needs Python 3.11 or newer")'
	@echo "set-up: a virtual environment in $(VENV), then its packages, then torch: a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints/development.txt
	@echo "set-up: the packages are there; torch follows"
	$(BIN)/python -m pip install --quiet --requirement constraints/torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(READY)
	$(BIN)/python -m examples.demo

# Four processes on two cores, because most of the tests' time is waiting.
test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist worksteal -m 'not system and not loaders and not long'

long: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.patches
	$(BIN)/python -m tools.names

# Three processes here, too: 77 s on two cores, where two took 102 s.
check: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal -q -m 'not system and not loaders and not slow'

bench: $(READY)
	$(BIN)/tierd bench overhead --rounds 15,15,5 --dir . --out benchmarks/results

gpu: $(READY)
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device: nothing was tested")'
	$(BIN)/python -m pytest -q tests/client/saving/test_cuda.py tests/client/saving/test_device_copies.py tests/state/test_load.py \
	  tests/client/restoring/test_device_uploads.py tests/client/saving/test_numa.py tests/end_to_end/test_resume_on_device.py
	$(BIN)/tierd bench overhead --device cuda --sizes 1,4 --rounds 5 --dir . --out benchmarks/gpu

$(VENV)/apart/.ready: constraints/deepspeed.txt $(READY)
	rm -rf $(VENV)/apart
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(VENV)/apart --requirement constraints/deepspeed.txt
	touch $@

loaders/ready: $(VENV)/apart/.ready
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints/loaders.txt
	cd $(VENV)/lib/python3*/site-packages/helm_python/lib && rm -f libhelm_c.so libhelm_c.so.0  # two further copies, of 85 MB each

loaders: loaders/ready
	TIERD_LOADERS=all $(BIN)/python -m pytest -n 2 --dist worksteal -m loaders tests/loaders tests/formats tests/watching

bed: loaders/ready
	TIERD_BED=all $(BIN)/python -m pytest -q tests/check/test_bed.py

reference: $(READY)
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.manpage

docs/ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints/docs.txt

docs: reference docs/ready
	$(BIN)/python -m sphinx -W --keep-going -q -j auto -d build/doctrees docs build/docs

# What the oldest versions do not name, such as torch, comes from the environment that the other tests have.
lowest: $(READY)
	$(PYTHON) -m venv $(VENV)/lowest
	$(VENV)/lowest/bin/python -m pip install --quiet --no-deps --requirement constraints/lowest.txt
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(echo $(VENV)/lowest/lib/python3*/site-packages)/rest.pth
	$(VENV)/lowest/bin/python -m tools.locked
	$(VENV)/lowest/bin/python -m pytest -n 2 -q -m 'not system' tests/core/test_ids.py tests/core/test_manifest.py \
	  tests/core/test_config.py tests/wire tests/stores/s3/test_s3_store.py tests/stores/test_file.py tests/cli/test_cli.py tests/codec/test_codec.py \
	  tests/daemon/http

# A file's tests share what it starts, such as a container, so they stay in one process.
system: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m system

$(VENV)/mutants/.ready: constraints/mutants.txt $(READY)
	rm -rf $(VENV)/mutants
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/mutants --requirement constraints/mutants.txt
	touch $@

mutants: $(VENV)/mutants/.ready
	PYTHONPATH=$(CURDIR)/$(VENV)/mutants $(BIN)/python -m mutmut run 'tierd.core.$(if $(ONLY),$(ONLY).)*'

faults: loaders/ready
	PYTHONPATH=tests:. $(BIN)/python -m faults short

gate: loaders/ready
	PYTHONPATH=tests:. $(BIN)/python -m faults gate
	TIERD_HISTORIES=1000 $(BIN)/python -m pytest -n 2 tests/reading/test_beside_writers.py
	TIERD_STATES=20000 $(BIN)/python -m pytest -n 2 tests/state/test_any_state.py
	TIERD_SEEDS=100 $(BIN)/python -m pytest -n 2 $$(grep -rlE --include='test_*.py' 'from support.seeds|^@given' tests)
	TIERD_KILLS=24 $(BIN)/python -m pytest -n 2 tests/end_to_end/test_acceptance.py
	TIERD_KILLS=50 $(BIN)/python -m pytest -m system tests/system/test_ranks_s3.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(READY)
	$(BIN)/python -m tools.lock

changelog: docs/ready
	$(BIN)/python -m towncrier build --yes --version $$($(BIN)/python -c 'import tierd; print(tierd.__version__)')

dist: $(READY)
	$(BIN)/python -m tools.dist $(if $(KEY),--key '$(KEY)') $(if $(UNSIGNED),--unsigned)

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
