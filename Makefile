# make env   .venv with requirements.txt
# make toy   train and evaluate the copy toy, draw its plot (out/toy_copy/)
# make test  everything that tests/ holds
# make seeds the eight-seed table of the README
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: env toy test seeds clean

env: .venv/env
.venv/env: requirements.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -q -r requirements.txt
	touch $@

.venv/dev: .venv/env requirements-dev.txt
	$(PY) -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	touch $@
