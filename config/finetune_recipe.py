# What keeps a language model while it learns to copy, and lets it copy far, on top of a finetuning config:
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py config/finetune_recipe.py --init_from=out/350m/2d

replay = 0.125  # an eighth of the rows go on with pretraining
train_data = "data/dclm"
text_noise = 0.4  # share of strings over 2 to 62 letters and digits, as noise strings in config/toy_copy.py
# first_weight = 8  # helps 4d-rope, not tried with others: docs/results.md
grad_accum = 4  # rows of replay are long, and those of copies short: apart, less padding is computed
