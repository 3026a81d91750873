# On top of config/pretrain.py and config/730m.py: 100B tokens, the paper's longest run.
#   torchrun --nproc_per_node=8 train.py config/pretrain.py config/730m.py config/730m_100b.py --out_dir=out/730m-100b

max_steps = 190_000  # 99.6B tokens
