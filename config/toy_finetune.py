# Finetuning in miniature (the paper's Table 1): the toy pretraining's model learns to copy Imbalanced strings of up to
# 64 symbols in instructions of many kinds, and is tested on lengths to 1,024 and on Recursive-Flip.
#   python train.py config/toy_finetune.py --init_from=out/toy_pretrain/2d-rope --out_dir=out/toy_finetune/2d-rope
#   python eval.py --runs=out/toy_finetune/2d-rope --tasks=imbalanced,recursive-flip --lengths=64,128,256,512,1024
# `make finetune` does that with config/finetune_recipe.py; without it, the language model is lost.

task = "finetune"
tokenizer = "bytes"
text_task = "imbalanced"
text_max_length = 64  # symbols, "0" and "1"

dtype = "float32"
batch_size = 32
max_steps = 900
learning_rate = 1e-3
min_lr = 0.0
warmup_steps = 50
weight_decay = 0.1
eval_interval = 100
eval_steps = 4
checkpoint_interval = 100
