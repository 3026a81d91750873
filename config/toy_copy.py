# One layer, strings of length 1 to 20, tested a thousand times longer.
#   python train.py config/toy_copy.py --out_dir=out/toy_copy/2d-rope

pos_encoding = "2d-rope"
freqs = "uniform"
n_layer, n_head, n_embd, head_dim = 1, 2, 128, 128
block_size = 1_000_000
