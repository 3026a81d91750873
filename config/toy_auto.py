# Auto-2D-RoPE without line breaks: the separator is a token that no rule knows, and that nothing announces.
#   python train.py config/toy_copy.py config/toy_auto.py --out_dir=out/toy_auto/auto-2d-rope
#   python eval.py --runs=out/toy_auto/auto-2d-rope --lengths=20,320,5120,20480 --samples=20,10,4,1
# About 60 s of one core; 8 of 8 seeds make no mistake at 20,480 (config/sweep_auto.py, README).
# With --n_layer=4, 4 minutes of one core: seeds 1, 2, 3 make none at 5,120; seed 0 does from 1,280 on.

pos_encoding = "auto-2d-rope"
separator = "*"

grid_steps = 250  # find the grid, then learn to copy on it
max_steps = 850
logit_scale = "log_n"
