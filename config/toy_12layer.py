# Twelve layers, trained on strings of 1 to 20 tokens: on top of config/toy_copy.py. 5 minutes of one core.
#   python train.py config/toy_copy.py config/toy_12layer.py --out_dir=out/toy_12layer/2d-rope
#   python eval.py --runs=out/toy_12layer/2d-rope --lengths=20,320,5120,20480 --samples=50,10,2,1
# No mistake at 20,480 in 8 of 8 seeds, and with --qk_norm=True in 8 of 8.

n_layer = 12
mlp_dim = 256
logit_scale = "log_n"
qk_norm_init = 0.25  # with --qk_norm=True: started at 1, attention is sharp before it knows where to look

batch_size, max_steps = 32, 600
learning_rate = 1e-3
warmup_steps = 100
closing_weight = 1.0
grad_accum = 4  # pieces of like length, so that less padding is computed
