# Finetuning on Python lists, as in the paper's section 5.4: comma-separated points of periodic signals in, a list out.
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py config/finetune_lists.py --init_from=out/350m/rope
# On top of config/finetune_copy.py. For GPUs; not yet run there.

text_task = "lists"
text_max_length = 0  # 50 to 150 points
