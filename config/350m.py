# On top of config/pretrain.py, which has the launch line. 459M parameters with Llama-3's vocabulary; 360M with
# 32,000 tokens, which the name fits. A step of 524,288 tokens is 1.8 x 10^15 FLOP, 14,000 of them 25 x 10^18.

n_layer, n_embd, n_head, head_dim, mlp_dim = 24, 1024, 8, 128, 3072
learning_rate = 5e-4  # peak, the paper's
