# make toy    sets up .venv, trains and evaluates the copy toy, draws its plot: out/toy_copy/accuracy.png
# make test   sets up .venv and runs all tests
# make transformers4  the tests of exported folders with transformers 4.57, in .venv-transformers4
# make env    only sets up .venv, from requirements.txt
# make seeds  the toy with 16 seeds: out/toy_seeds/
# make pretrain  byte-level models of 2M parameters, four encodings: out/toy_pretrain/; ten minutes each
# make figure4  every encoding, 1, 4 and 12 layers, four seeds (the paper's Figure 4): out/figure4/; hours
# make finetune  after pretrain: its models learn to copy strings in text: out/toy_finetune/; 20 minutes each, RoPE 80
# make lists  after pretrain: its models learn to write lists of numbers: out/toy_lists/
# OpenMP threads that spin while they wait slow each other ten-fold where anything else is running.
export OMP_WAIT_POLICY ?= PASSIVE
PYTHON ?= python3
PY := .venv/bin/python
# Two threads take longer for so small a model.
TRAIN_TOY := OMP_NUM_THREADS=1 $(PY) train.py config/toy_copy.py
TOY := out/toy_copy
SEEDS := out/toy_seeds
ALL_SEEDS := 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
ENCODINGS := rope h-rope 2d-rope 4d-rope
# Encoding and seed of each finetuning. RoPE needs three times the steps to learn the lengths that it is trained on.
FINETUNED := rope-0 h-rope-0 2d-rope-0 4d-rope-0 4d-rope-1 4d-rope-2
comma := ,
list = $(subst $() ,$(comma),$(strip $(1)))

.PHONY: env toy seeds figure4 toy-data pretrain finetune lists test transformers4
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
	$(TRAIN_TOY) --out_dir=$(TOY)/2d-rope
	$(TRAIN_TOY) --pos_encoding=rope --freqs=geometric --max_steps=7000 --out_dir=$(TOY)/rope
	$(PY) eval.py --runs=$(TOY)/2d-rope,$(TOY)/rope --lengths=5,20,320,5120,20480 --samples=100,100,20,4,1 \
	  --out_dir=$(TOY)

seeds: env
	for seed in $(ALL_SEEDS); do \
	  $(TRAIN_TOY) --seed=$$seed --freqs_seed=$$seed --out_dir=$(SEEDS)/$$seed || exit 1; done
	$(PY) eval.py --runs=$(call list,$(ALL_SEEDS:%=$(SEEDS)/%)) \
	  --lengths=20,320,5120,20480 --samples=100,20,4,1 --out_dir=$(SEEDS)

figure4: env
	$(PY) -m scripts.sweep config/figure4.py

data/text/val.jsonl.zst: | env
	$(PY) -m scripts.local_text --out_dir=data/text

toy-data: data/text/val.jsonl.zst
	for part in train val; do $(PY) data_dclm.py --sources=data/text/$$part.jsonl.zst --tokenizer=bytes --length=512 \
	  --packing=continue --out_dir=data/toy/$$part || exit 1; done

pretrain: toy-data
	for encoding in $(ENCODINGS); do $(PY) train.py config/toy_pretrain.py config/text_recipe.py \
	  --pos_encoding=$$encoding --out_dir=out/toy_pretrain/$$encoding || exit 1; done
	$(PY) eval.py --runs=$(call list,$(ENCODINGS:%=out/toy_pretrain/%)) --val_data=data/toy/val --windows=1024 \
	  --out_dir=out/toy_pretrain

finetune: env
	for run in $(FINETUNED); do encoding=$${run%-*}; steps=900; test $$encoding != rope || steps=3000; \
	  $(PY) train.py config/toy_finetune.py config/finetune_recipe.py --train_data=data/toy/train --max_steps=$$steps \
	    --init_from=out/toy_pretrain/$$encoding --seed=$${run##*-} --out_dir=out/toy_finetune/$$run || exit 1; done
	$(PY) eval.py --runs=$(call list,$(FINETUNED:%=out/toy_finetune/%)) --tasks=imbalanced,recursive-flip \
	  --lengths=1-64,65-128,129-256,257-512,513-1024 --samples=50 --val_data=data/toy/val --out_dir=out/toy_finetune

lists: env
	for encoding in $(ENCODINGS); do \
	  $(PY) train.py config/toy_finetune.py config/toy_lists.py --init_from=out/toy_pretrain/$$encoding \
	    --out_dir=out/toy_lists/$$encoding || exit 1; done
	$(PY) eval.py --runs=$(call list,$(ENCODINGS:%=out/toy_lists/%)) --tasks=lists --lengths=4-40,41-80,81-120 \
	  --samples=30 --out_dir=out/toy_lists

test: .venv/dev
	$(PY) -m pytest -q

transformers4:
	test -d .venv-transformers4 || $(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/python -m pip install --disable-pip-version-check -q -r requirements.txt "transformers==4.57.*" pytest
	.venv-transformers4/bin/python -m pytest -q tests/test_hf.py
