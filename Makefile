# make toy    sets up .venv, trains and evaluates the copy toy, draws its plot: out/toy_copy/accuracy.png
# make test   sets up .venv and runs all tests
# make env    only sets up .venv, from requirements.txt
# make seeds  the toy with eight seeds (the README's second table): out/toy_seeds/
PYTHON ?= python3
PY := .venv/bin/python
TOY := out/toy_copy
SEEDS := out/toy_seeds
comma := ,
list = $(subst $() ,$(comma),$(strip $(1)))

.PHONY: env toy seeds test
.DELETE_ON_ERROR:

env: .venv/env
.venv/env: requirements.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --disable-pip-version-check -q -r requirements.txt
	touch $@
.venv/dev: .venv/env requirements-dev.txt
	$(PY) -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	touch $@

toy: env
	$(PY) train.py config/toy_copy.py --out_dir=$(TOY)/2d-rope
	$(PY) train.py config/toy_copy.py --pos_encoding=rope --freqs=geometric --out_dir=$(TOY)/rope
	$(PY) eval.py --runs=$(TOY)/2d-rope,$(TOY)/rope --lengths=5,20,320,5120,20480 --samples=100,100,20,4,1 \
	  --out_dir=$(TOY)

seeds: env
	for seed in 0 1 2 3 4 5 6 7; do \
	  $(PY) train.py config/toy_copy.py --seed=$$seed --freqs_seed=$$seed --out_dir=$(SEEDS)/$$seed || exit 1; done
	$(PY) eval.py --runs=$(call list,$(foreach seed,0 1 2 3 4 5 6 7,$(SEEDS)/$(seed))) \
	  --lengths=20,320,5120,20480 --samples=100,20,4,1 --out_dir=$(SEEDS)

test: .venv/dev
	$(PY) -m pytest -q
