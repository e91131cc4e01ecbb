# The two commands that set everything up: `make quickstart`, `make test`.
PYTHON ?= python3
PIP = .venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt
export PYTHONSAFEPATH = 1

TYPES = .venv/types/trainworthy

.PHONY: quickstart test smoke verify lint types docs bench clean

quickstart: .venv/.vision
	.venv/bin/trainworthy run vision/classify

test: .venv/.all
	.venv/bin/python -m pytest -n 2 --dist loadgroup --durations 40 -m "not verify"

smoke: .venv/.all
	.venv/bin/python -m pytest -m smoke -n 2 --dist load tests/$(DOMAIN)

verify: .venv/.all
	.venv/bin/python -m pytest -n 2 --dist loadgroup --record docs/verify.md

docs: .venv/.all
	.venv/bin/python -m mkdocs build --strict

lint: .venv/.all types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# A checkout as it is installed: `trainworthy.core` is the folder core/.
types: .venv/.all
	@rm -rf $(TYPES) && mkdir -p $(TYPES) && ln -sfn $(CURDIR)/trainworthy/*.py $(CURDIR)/core $(CURDIR)/guard $(TYPES)
	MYPYPATH=.venv/types .venv/bin/mypy --cache-dir .venv/mypy
	MYPYPATH=.venv/types .venv/bin/mypy --cache-dir .venv/mypy tests/helpers/typed.py

bench: .venv/.all
	.venv/bin/python bench/overhead.py
	.venv/bin/python bench/rl.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv

.venv/.vision: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing torch, torchvision and the core (a minute or two, about 5.5 GB)"
	$(PIP) -e '.[vision]'
	@touch $@

.venv/.all: .venv/.vision
	$(PIP) -e '.[all,dev]'
	@touch $@

clean:
	rm -rf .venv runs
