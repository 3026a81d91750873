# Pretraining as in the paper's section 5 and appendix E: Qwen3-like models, steps of 256 x 2,048 tokens of DCLM. What
# all runs share; a size comes on top, the encoding (rope, 2d-rope or h-rope) as a flag:
#   torchrun --nproc_per_node=8 train.py config/pretrain.py config/350m.py --pos_encoding=rope --out_dir=out/350m/rope
#   ... config/730m.py, config/1.4b.py, or config/730m.py config/730m_100b.py
# On several machines the same line on each, with torchrun's own flags in front:
#   torchrun --nproc_per_node=8 --nnodes=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py ...
# The shards, once:
#   python data_dclm.py --dataset=mlfoundations/dclm-baseline-1.0 --max_tokens=8_000_000_000 --out_dir=data/dclm
#   python data_dclm.py --dataset=HuggingFaceFW/fineweb-edu --max_tokens=10_000_000 --out_dir=data/fineweb-edu
# For GPUs; not yet run there. Without one: config/toy_pretrain.py.

task = "pretrain"
tokenizer = "llama3"  # 128,256 tokens
train_data = "data/dclm"
val_data = "data/fineweb-edu"

pos_encoding = "2d-rope"
block_size = 2048
tie_weights = True
qk_norm = False  # the released configs have it off; on, it bounds how far a model can learn to copy

batch_size = 256  # sequences a step: 524,288 tokens
grad_accum = 4
schedule = "wsd"
warmup_steps = 100
max_steps = 14_000  # 7.3B tokens; 30,000: 15.7B; 56,000: 29.4B
weight_decay = 0.1
eval_interval = 500
eval_steps = 8  # 4.2M tokens
checkpoint_interval = 500
compile = True
