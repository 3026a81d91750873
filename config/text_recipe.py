# What text models that copy far start from, on top of a pretraining config; any encoding can have it:
#   torchrun --nproc_per_node=8 train.py config/pretrain.py config/350m.py config/text_recipe.py --out_dir=out/350m/2d
#   python train.py config/toy_pretrain.py config/text_recipe.py --pos_encoding=4d-rope --out_dir=out/toy_text/4d-rope
# docs/results.md has what each line does to the loss on text.

freqs = "mixed"
shared_embed_init = 1.0
logit_scale = "log_n"  # attention stays sharp over more keys than in training; costs 0.01 nats a byte
