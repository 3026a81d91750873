# On top of config/pretrain.py, which has the launch line. 1,613M parameters with Llama-3's vocabulary; 1,416M with
# 32,000 tokens, which the name fits. A step of 524,288 tokens is 5.8 x 10^15 FLOP, 14,000 of them 81 x 10^18.

n_layer, n_embd, n_head, head_dim, mlp_dim = 28, 2048, 16, 128, 5120
learning_rate = 2e-4  # peak, the paper's
