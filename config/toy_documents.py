# Passages in miniature: on top of config/toy_finetune.py, 1 to 8 lines of prose, code, JSON, CSV, logs and words;
# tested on up to eight times as many.
#   python train.py config/toy_finetune.py config/finetune_recipe.py config/toy_documents.py \
#     --train_data=data/toy/train --init_from=out/toy_pretrain/2d-rope --out_dir=out/toy_documents/2d-rope
#   python eval.py --runs=out/toy_documents/2d-rope --tasks=prose,csv --lengths=8,16,32,64 --block_size=20000
# `make documents` does that for four encodings and two seeds.

text_task = "documents"
text_max_length = 8  # lines
batch_size = 16
max_steps = 450
