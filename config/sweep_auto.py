# Separators that no rule knows (config/toy_auto.py): Auto-2D with both gates, 2D-RoPE's rule, RoPE. Eight seeds each.
#   python -m scripts.sweep config/sweep_auto.py

_auto = "config/toy_copy.py config/toy_auto.py"
runs = (
    f"auto-saturating {_auto}",
    f"auto-sigmoid {_auto} --auto_gate=sigmoid --grid_steps=0 --auto_bias=2 --gate_lr_scale=30",  # best of 9 tried
    f"2d-rope-rule {_auto} --pos_encoding=2d-rope --grid_steps=0",
    f"rope {_auto} --pos_encoding=rope --grid_steps=0 --freqs=geometric",
)
seeds = (0, 1, 2, 3, 4, 5, 6, 7)
lengths = (20, 40, 80, 320, 1280, 5120, 20480)
samples = (50, 20, 20, 10, 4, 2, 1)
out_dir = "out/sweep_auto"
