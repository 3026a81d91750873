# Pretraining in miniature, on a CPU: 2.0M parameters, bytes as tokens, text that is on any machine with
# Python (the standard library's sources, pydoc's topics, the descriptions of installed packages; a tenth of the
# documents is for validation).
#   make toy-data                                       # shards in data/toy
#   python train.py config/toy_pretrain.py config/text_recipe.py --out_dir=out/toy_pretrain/2d-rope
#   python sample.py --run=out/toy_pretrain/2d-rope --prompt="import "
# `make pretrain` does all that for rope, h-rope, 2d-rope and 4d-rope. Without config/text_recipe.py, settings are the
# paper's. On a Xeon without AMX a step takes 0.74 s of one thread, 0.46 s of two, in bfloat16 2.4 s.

task = "pretrain"
tokenizer = "bytes"
train_data = "data/toy/train"
val_data = "data/toy/val"

pos_encoding = "2d-rope"
n_layer, n_head, head_dim, n_embd, mlp_dim = 4, 3, 64, 192, 576
block_size = 4096
tie_weights = True

dtype = "float32"
batch_size = 8  # sequences of 512 bytes
max_steps = 500
schedule = "wsd"
learning_rate = 2e-3
warmup_steps = 50
weight_decay = 0.1
eval_interval = 100
eval_steps = 16
checkpoint_interval = 100
