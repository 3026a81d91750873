# The paper's deep copy model (its section 3.4.2 and appendix D): 12 layers, 12 heads of 128, strings of 1 to 100.
#   python train.py config/copy_12layer.py --pos_encoding=2d-rope --seed=0 --out_dir=out/copy_12layer/2d-rope-0
#   torchrun --nproc_per_node=8 train.py config/copy_12layer.py --grad_accum=1 --out_dir=out/copy_12layer/2d-rope-0
# For GPUs; not yet run there. The learning rate and the number of steps are ours: the text of the paper has none;
# freqs and shared_embed_init are what the toy found; the paper has geometric ones and no common part.

task = "copy"
copy_task = "imbalanced"
max_length = 100
noise = 0.1

pos_encoding = "2d-rope"
freqs = "uniform"
shared_embed_init = 1.0

n_layer, n_head, n_embd, head_dim = 12, 12, 1536, 128
block_size = 210_000

batch_size = 256  # the paper's 64 x 4
grad_accum = 4
max_steps = 5000
learning_rate = 2e-4
warmup_steps = 100
weight_decay = 0.01
beta2 = 0.95
