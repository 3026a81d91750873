# Auto-2D-RoPE without line breaks: the separator is a token that no rule knows, and that nothing announces.
#   python train.py config/toy_copy.py config/toy_auto.py --out_dir=out/toy_auto/auto-2d-rope
#   python eval.py --runs=out/toy_auto/auto-2d-rope --lengths=20,320,5120,20480 --samples=20,10,4,1
# About 60 s of one core; 8 of 8 seeds make no mistake at 20,480 (config/sweep_auto.py, docs/results.md).
# With --n_layer=4, 3 minutes of one core: seeds 0, 1, 2 make none at 20,480; seed 3 does at 5,120.

pos_encoding = "auto-2d-rope"
separator = "*"

grid_steps = 250  # find the grid, then learn to copy on it
noise = 0.3  # with a tenth, symbols that only noise has are seen too seldom, and some end up as separators
mlp_dim = 512
batch_size, max_steps = 32, 850
learning_rate = 2e-3
warmup_steps = 100
closing_weight = 1.0
logit_scale = "log_n"
