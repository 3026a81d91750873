# What keeps a language model while it learns to copy, and lets it copy far, on top of a finetuning config:
#   torchrun --nproc_per_node=8 train.py config/finetune_copy.py config/finetune_recipe.py --init_from=out/350m/2d

replay = 0.125  # an eighth of the rows go on with pretraining
train_data = "data/dclm"
text_noise = 0.4  # share of strings over 2 to 62 letters and digits, as noise strings in config/toy_copy.py
text_lead = 0.5  # share of prompts with words before them, so that no string is found by where it begins
first_weight = 8  # the first symbol is looked up elsewhere than all others, and is one target in 33
grad_accum = 4  # rows of replay are long, and those of copies short: apart, less padding is computed
