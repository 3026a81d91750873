# What keeps a language model while it learns to copy, and lets it copy far, on top of a finetuning config:
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py config/finetune_recipe.py --init_from=out/350m/2d

replay = 0.125  # an eighth of the rows go on with pretraining; a quarter costs half as much time again
train_data = "data/dclm"
text_noise = 0.4  # strings of 2 to 62 letters and digits: only deep models that see many symbols copy far
grad_accum = 4  # rows of replay are long, and those of copies short: apart, less padding is computed
