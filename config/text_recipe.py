# What helps a text model to copy far, on top of a pretraining config; any encoding can have it:
#   torchrun --nproc_per_node=8 train.py config/pretrain.py config/350m.py config/text_recipe.py --out_dir=out/350m/2d
#   python train.py config/toy_pretrain.py config/text_recipe.py --pos_encoding=4d-rope --out_dir=out/toy_text/4d-rope
# docs/results.md has what each line does to the loss on text.

freqs = "mixed"  # half of them RoPE's, which tell near from far; half uniform, which repeat at no short distance
shared_embed_init = 1.0
logit_scale = "log_n"  # attention stays sharp over more keys than in training; costs 0.01 nats a byte
