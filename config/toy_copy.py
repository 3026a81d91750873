# The paper's headline on a laptop: one layer, trained on strings of 1 to 20 tokens, tested a thousand times longer.
#   python train.py config/toy_copy.py --out_dir=out/toy_copy/2d-rope
#   python train.py config/toy_copy.py --pos_encoding=rope --freqs=geometric --out_dir=out/toy_copy/rope
# `make toy` runs both and evaluates them. 25 s each on two cores; 2D-RoPE makes no mistake at 20,480, RoPE fails at 20.

task = "copy"
copy_task = "imbalanced"
max_length = 20
noise = 0.1

pos_encoding = "2d-rope"
freqs = "uniform"  # geometric ones alias: perfect to 320, wrong at 5,120
shared_embed_init = 1.0  # without it 3 of 8 seeds reach 20,480, with it all

n_layer, n_head, n_embd, head_dim = 1, 2, 128, 128
block_size = 1_000_000

batch_size = 32
max_steps = 600
learning_rate = 2e-3
weight_decay = 0.01
