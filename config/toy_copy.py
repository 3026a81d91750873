# The paper's headline on a laptop: one layer, trained on strings of 1 to 20 tokens, tested a thousand times longer.
#   python train.py config/toy_copy.py --out_dir=out/toy_copy/2d-rope
#   python train.py config/toy_copy.py --pos_encoding=rope --freqs=geometric --out_dir=out/toy_copy/rope
# `make toy` trains both, RoPE with ten times the steps, and evaluates them: 2D-RoPE makes no mistake at 20,480 tokens.

task = "copy"
copy_task = "imbalanced"
max_length = 20
noise = 0.1
closing_weight = 4.0  # the line break that ends a copy is one target in 11.5, and the first to fail far out

pos_encoding = "2d-rope"
freqs = "uniform"  # geometric ones alias: perfect to 320, wrong at 5,120 (600 steps of 32 strings)
shared_embed_init = 1.0  # without it 3 of 8 seeds reach 20,480 (600 steps of 32 strings), with it all

n_layer, n_head, n_embd, head_dim, mlp_dim = 1, 2, 128, 128, 128
block_size = 1_000_000

batch_size = 8
max_steps = 700  # 500: the margin is 14, not 18
learning_rate = 1e-3  # 500 steps with 2e-3 fail at 20,480
warmup_steps = 50
weight_decay = 0.01
