# Finetuning on copies of strings in text, as in the paper's section 5.3 and appendix E.3: 200,000 examples of
# Imbalanced strings in instructions of many kinds, from a pretrained model of ours or from a Qwen3.
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py --init_from=out/350m/rope --out_dir=out/350m/rope-copy
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py --init_from=Qwen3-1.7B --tokenizer=Qwen3-1.7B
# The encoding is the pretrained one's, unless --pos_encoding says otherwise. For GPUs; not yet run there. A weight
# takes 16 bytes of each GPU (float32 with its gradient and AdamW's moments): the paper's Qwen3-8B does not fit one.

task = "finetune"
text_task = "imbalanced"
symbols = (" a", " b")
text_max_length = 1000  # symbols

batch_size = 64
grad_accum = 1
max_steps = 3125
learning_rate = 5e-5  # the paper's best of 3e-5, 5e-5, 1e-4
min_lr = 0.0
warmup_steps = 100
weight_decay = 0.1
