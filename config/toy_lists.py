# Python lists in miniature (the paper's Figure 6): on top of config/toy_finetune.py, lists of 4 to 40 points of
# periodic signals; tested on up to twice and three times as many.
#   python train.py config/toy_finetune.py config/toy_lists.py --init_from=out/toy_pretrain/rope --out_dir=out/lists
#   python eval.py --runs=out/lists --tasks=lists --lengths=4-40,41-80,81-120
# `make lists` does that for four encodings. On a CPU in bfloat16 memory grows to 9 GB over the many shapes.

text_task = "lists"
text_min_length, text_max_length = 4, 40  # points
batch_size = 16
max_steps = 300
